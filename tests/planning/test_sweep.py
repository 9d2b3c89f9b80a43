"""A sweep gives what the scalar path gives, for every method and for the three swept sizes at
once."""

from __future__ import annotations

import numpy as np
import pytest
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Loss,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import estimate
from napkinmath.models.families import read_config
from napkinmath.planning.sweep import PHASES, sweep

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "vocab_size": 3000,
    "num_hidden_layers": 5,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CHECKPOINTED = RecomputeConfig(kind=RecomputeKind.FULL)
CONFIGS = {
    "full": TrainConfig(optimizer="adamw-foreach"),
    "full accumulated": TrainConfig(gradient_accumulation_steps=3, recompute=CHECKPOINTED),
    "eager": TrainConfig(attention=Attention.EAGER),
    "lora": TrainConfig(adapter=AdapterConfig(dropout=0.05)),
    "qlora": TrainConfig(
        adapter=AdapterConfig(), quantization=QuantizationConfig(), recompute=CHECKPOINTED
    ),
    "int8": TrainConfig(
        adapter=AdapterConfig(), quantization=QuantizationConfig(format="int8", double_quant=False)
    ),
    "int8 of 2023": TrainConfig(
        adapter=AdapterConfig(),
        quantization=QuantizationConfig(format="int8", double_quant=False),
        stack="hf-2023",
    ),
    "chunked loss": TrainConfig(loss=Loss.CHUNKED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_cell_equals_the_scalar_estimate(name: str) -> None:
    config, spec, hardware = CONFIGS[name], read_config(LLAMA), find_hardware("l4")
    batches, lengths, ranks = (
        np.array([1, 3])[:, None, None],
        np.array([1, 65, 1000])[None, :, None],
        np.array([4, 33])[None, None, :],
    )
    found = sweep(
        spec,
        config,
        micro_batch_size=batches,
        sequence_length=lengths,
        rank=ranks,
        hardware=hardware,
    )
    for cell in np.ndindex(found.requested.shape):
        b, s, r = (
            int(batches[cell[0], 0, 0]),
            int(lengths[0, cell[1], 0]),
            int(ranks[0, 0, cell[2]]),
        )
        adapter = config.adapter.replace(rank=r) if config.adapter is not None else None
        one = estimate(
            spec,
            config.replace(micro_batch_size=b, sequence_length=s, adapter=adapter),
            hardware=hardware,
        )
        assert found.requested[cell] == one.peak.nbytes
        assert PHASES[found.winner[cell]] == next(iter(one.phase_peaks))
        assert one.time is not None and found.tokens_per_s is not None
        assert found.tokens_per_s[cell] == pytest.approx(one.time.tokens_per_s, rel=1e-12)


def test_where_the_host_waits_for_experts_the_speed_is_the_scalar_estimates() -> None:
    """The L4's experts are a loop of products, whose offsets the host reads first."""
    spec, config = read_config(MIXTRAL), TrainConfig(adapter=AdapterConfig())
    found = sweep(spec, config, sequence_length=64, hardware=find_hardware("l4"))
    one = estimate(spec, config.replace(sequence_length=64), hardware="l4")
    assert one.time is not None and found.tokens_per_s is not None
    assert any(phase.waited_s for phase in one.time.phases)
    assert found.tokens_per_s == pytest.approx(one.time.tokens_per_s, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in DataParallel if kind is not DataParallel.NONE])
def test_ranks_of_adapters_under_every_engine_equal_the_scalar_estimate(kind: DataParallel) -> None:
    spec, ranks = read_config(LLAMA), [4, 33]
    parallel = ParallelConfig(data_parallel=kind, data_parallel_size=4)
    config = TrainConfig(adapter=AdapterConfig(), parallel=parallel)
    found = sweep(spec, config, micro_batch_size=2, sequence_length=65, rank=ranks)
    for rank, nbytes in zip(ranks, found.requested, strict=True):
        one = config.replace(
            micro_batch_size=2, sequence_length=65, adapter=AdapterConfig(rank=rank)
        )
        assert nbytes == estimate(spec, one).peak.nbytes


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="micro_batch_size"):
        sweep(read_config(LLAMA), TrainConfig(), micro_batch_size=[1, 0])
    with pytest.raises(InputError, match="sequence_length"):
        sweep(read_config(LLAMA), TrainConfig(), sequence_length=[1.5])
