"""Full state dicts: what is whole on the device while they are gathered, and in host memory after."""

from __future__ import annotations

import pytest
from napkinmath.base.expr import Bindings
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Role, Tensor

VOCABULARY, HIDDEN = 32000, 4096  # of Llama 2 7B
RANKS = 8


def saved(kind: DataParallel, *, whole: bool = True) -> Estimate:
    parallel = ParallelConfig(data_parallel=kind, data_parallel_size=RANKS, full_state_dict=whole)
    config = TrainConfig(
        sequence_length=64,
        precision=Precision.BF16_AMP,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
        parallel=parallel,
    )
    return estimate("llama-2-7b", config)


def beside_shards(e: Estimate) -> int:
    """The most bytes that saving makes beside what the rank keeps."""
    bind, live, most = Bindings(e.step.symbols), 0, 0
    for segment in e.step.save:
        for action, tensor in segment.events * segment.repeat:
            if isinstance(tensor, Tensor) and action in (ALLOC, FREE):
                live += bind(tensor.nbytes) * (1 if action == ALLOC else -1)
                most = max(most, live)
    assert live == 0
    return most


# Bytes that saving makes: FSDP 1 the states of the embedding, twice fp32, more than its root's
# parameters; FSDP 2 one fp32 parameter, ZeRO 3 one of 16 bits.
MOST = {
    DataParallel.FSDP1: 2 * 4 * VOCABULARY * HIDDEN + 4 * HIDDEN,
    DataParallel.FSDP2: 4 * VOCABULARY * HIDDEN,
    DataParallel.ZERO3: 2 * VOCABULARY * HIDDEN,
}
# Bytes a parameter on rank 0's host: parameters, and under FSDP 1 both states.
ON_HOST = {DataParallel.FSDP1: 12, DataParallel.FSDP2: 4, DataParallel.ZERO3: 2}


@pytest.mark.parametrize("kind", MOST)
def test_whole_parameters_come_one_unit_or_tensor_at_a_time(kind: DataParallel) -> None:
    e = saved(kind)
    layer = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * 11008 + 2 * HIDDEN)  # fp32, less than the embedding's
    root = 4 * (2 * VOCABULARY + 1) * HIDDEN
    states = 2 * layer  # a layer's own states
    expected = MOST[kind]
    if kind is DataParallel.FSDP1:
        expected = max(expected, root + layer, states)
    assert beside_shards(e) == pytest.approx(expected, rel=1e-4)
    assert e.phase_peaks[Phase.SAVE].nbytes >= expected


@pytest.mark.parametrize("kind", ON_HOST)
def test_rank_0_holds_the_whole_in_host_memory(kind: DataParallel) -> None:
    e = saved(kind)
    assert e.host_memory.saving == pytest.approx(ON_HOST[kind] * e.num_parameters, rel=1e-3)
    assert e.host_memory.needed >= e.host_memory.saving
    assert saved(kind, whole=False).host_memory.saving == 0


@pytest.mark.parametrize(("stack", "share"), [("hf", 1), ("torchtune", RANKS)])
def test_scales_of_4_bit_weights_are_whole_or_sharded(stack: str, share: int) -> None:
    """bitsandbytes' stay whole on every rank; torchao's NF4 tensor is chunked with all it has."""

    def scales(ranks: int) -> int:
        config = TrainConfig(
            sequence_length=64,
            precision=Precision.BF16,
            adapter=AdapterConfig(rank=8),
            quantization=QuantizationConfig(format="nf4", double_quant=True),
            parallel=ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=ranks),
            stack=stack,
        )
        found = estimate("llama-2-7b", config)
        return found.breakdown[Role.QUANTIZATION]

    assert scales(RANKS) == pytest.approx(scales(1) / share, rel=0.03)  # parts round up
