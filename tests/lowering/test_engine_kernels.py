"""Kernels that an engine's own code fuses or hides: attention, rotation, loss, merges of a ring and
tensor-parallel collectives."""

from __future__ import annotations

import pytest
from napkinmath import TrainConfig, estimate
from napkinmath.base.dtypes import BF16
from napkinmath.base.expr import Bindings
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.stacks import STACKS, find_stack
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import Attention, Precision
from napkinmath.ir.costs import Collective, Gemm
from napkinmath.ir.ledger import Op
from napkinmath.ir.stack import Stack
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve, sdpa_choice
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
}
SPLIT = ParallelConfig(tensor_parallel_size=4, sequence_parallel=True)


def blocks(stack: Stack, parallel: ParallelConfig) -> tuple[list[Op], Bindings]:
    """The operations of all distinct blocks."""
    config = TrainConfig(
        micro_batch_size=2, sequence_length=512, precision=Precision.BF16, parallel=parallel
    )
    step = build_step(read_config(LLAMA), Policy(config, stack))
    return [op for run in step.runs for op in run.block.ops], Bindings(step.symbols)


# ---------------------------------------------------------------- one GPU


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("gpu", ["A100", "L40S", "H100", "B200", "V100-32"])
@pytest.mark.parametrize(
    "named", [Attention.AUTO, Attention.SDPA, Attention.FLASH1, Attention.FLASH2, Attention.EAGER]
)
def test_cudnn_runs_from_hopper_on_where_a_stack_or_torch_prefers_it(
    stack: Stack, gpu: str, named: Attention
) -> None:
    hardware = find_hardware(gpu)
    found = sdpa_choice(TrainConfig(attention=named), hardware, stack)
    prefers = stack.attention.prefers_cudnn and named is Attention.AUTO
    # torchtitan's list of kernels is for whatever asks for SDPA
    least = {"A100": 8, "L40S": 8, "H100": 9, "B200": 10, "V100-32": 7}[gpu]
    ordered = 0 < stack.attention.sdpa_cudnn_from <= least
    today = not stack.attention.own and stack.model.transformers >= (5, 0)
    first = (today or ordered) and named in (Attention.AUTO, Attention.SDPA)
    expected = (prefers or first) and hardware.gpu.is_hopper_or_later
    assert (found is Attention.CUDNN) is (expected and gpu != "L40S")
    config = TrainConfig(attention=named, stack=stack.name)
    assert resolve(read_config(LLAMA), config, hardware).sdpa_choice is found


@pytest.mark.parametrize(
    ("gpu", "stack", "small", "large", "masked"),
    [
        ("H100", "hf", "cudnn", "cudnn", "cudnn"),
        ("GB300", "hf", "cudnn", "flash", "cudnn"),
        ("5090", "hf", "flash", "flash", "efficient"),  # compute capability 12
        ("MI300X", "hf", "flash", "flash", "efficient"),
        ("H100", "hf-4.57", "flash", "flash", "efficient"),  # torch 2.9 and its like
        ("H100", "megatron", "cudnn", "cudnn", "cudnn"),
        ("H100", "megatron-2024", "cudnn", "flash", "cudnn"),  # cuDNN before 9.5
        ("B200", "megatron", "cudnn", "flash", "cudnn"),
    ],
)
def test_cudnn_takes_masks_and_on_hopper_wide_heads(
    gpu: str, stack: str, small: str, large: str, masked: str
) -> None:
    """sdp_utils.cpp can_use_cudnn_attention and check_cudnn_tensor_shapes; Transformer Engine's
    nvte_get_fused_attn_backend. Gemma has heads of 256, Nemotron 340B of 192."""
    policy = resolve(read_config(LLAMA), TrainConfig(stack=stack), find_hardware(gpu))

    def kernel(size: int, *, by_mask: bool = False) -> str:
        return policy.sdpa_kernel(BF16, head_size=size, masked=by_mask, grouped=False)

    assert (kernel(128), kernel(256), kernel(128, by_mask=True)) == (small, large, masked)
    assert kernel(192) == large


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_a_fused_rotation_is_one_kernel_for_queries_and_one_for_keys(stack: Stack) -> None:
    names = [op.name for op in blocks(stack, ParallelConfig())[0]]
    assert names.count("rotary") == (2 if stack.attention.rotary == "fused" else 0)
    if stack.attention.rotary == "fused":
        assert "neg" not in names and "cat" not in names


def test_the_loss_over_a_vocabulary_is_the_same_on_one_rank_and_on_several() -> None:
    found = [
        [op for op in blocks(find_stack("megatron"), p)[0] if "cross_entropy" in op.name]
        for p in (ParallelConfig(), ParallelConfig(tensor_parallel_size=2))
    ]
    (alone,), (shared,) = found
    assert alone.name == shared.name
    assert len(alone.saves) == len(shared.saves)
    assert not any(isinstance(cost, Collective) for cost in alone.costs)


# ---------------------------------------------------------------- several


@pytest.mark.parametrize("degree", [2, 4])
def test_a_narrow_ring_sends_half_the_gradients_and_merges_in_fewer_bytes(degree: int) -> None:
    sent, merged = [], []
    for stack in ("megatron", "hf"):
        ops, bind = blocks(find_stack(stack), ParallelConfig(context_parallel_size=degree))
        (ring,) = [op for op in ops if "ring" in op.name][:1]
        sends = [c for c in ring.backward_costs if isinstance(c, Collective)]
        sent.append([bind(c.moved) for c in sends])
        merged.append(sum(bind(c.moved) for c in ring.costs if not isinstance(c, Collective)))
    # torch gathers all parts at once, a narrow ring sends those of the other ranks
    assert degree * sent[0][0] == (degree - 1) * sent[1][0]
    assert 2 * sent[0][1] == sent[1][1]
    assert merged[0] < merged[1]


def hidden(stack: str, parallel: ParallelConfig) -> list[Collective]:
    return [
        cost
        for op in blocks(find_stack(stack), parallel)[0]
        for cost in (*op.costs, *op.backward_costs)
        if isinstance(cost, Collective) and cost.beside
    ]


def test_each_collective_of_a_layer_has_the_product_that_hides_it() -> None:
    """Two gathers and two reductions a layer, and their opposites."""
    found = hidden("nemo", SPLIT)
    assert len(found) == 8
    assert all(isinstance(p, Gemm) for cost in found for p in cost.beside)
    kinds = sorted((cost.kind, cost.chunks, len(cost.beside)) for cost in found)
    # reading: q, k, v or gate and up; their gradients as a whole beside those of the weights
    assert kinds == [
        ("all-gather", 4, 1),
        ("all-gather", 4, 1),
        ("all-gather", 4, 2),
        ("all-gather", 4, 3),
        ("reduce-scatter", 0, 2),
        ("reduce-scatter", 0, 3),
        ("reduce-scatter", 4, 1),
        ("reduce-scatter", 4, 1),
    ]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    "parallel", [SPLIT, SPLIT.replace(sequence_parallel=False)], ids=["sequence", "whole"]
)
def test_nothing_is_hidden_without_a_split_sequence_or_the_engines_buffers(
    stack: str, parallel: ParallelConfig
) -> None:
    may = find_stack(stack).engine.hides_tensor_collectives and parallel.sequence_parallel
    assert bool(hidden(stack, parallel)) is may


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_hidden_collectives_take_less_and_never_more_than_none_would_save(
    gpu: str, degree: int
) -> None:
    machines = Cluster(hardware=find_hardware(gpu), gpus_per_node=degree)
    mesh = ParallelConfig(tensor_parallel_size=degree, sequence_parallel=True)
    communication, seconds = [], []
    for stack in ("nemo", "megatron"):
        config = TrainConfig(
            micro_batch_size=1,
            sequence_length=4096,
            precision=Precision.BF16,
            parallel=mesh,
            stack=stack,
        )
        time = estimate("llama-3.2-1b", config, hardware=machines).time
        assert time is not None
        seconds.append(time.seconds)
        communication.append(
            sum(dict(p.shares).get("communication", 0.0) * p.device_s for p in time.phases)
        )
    assert 0 < communication[0] < communication[1]
    assert seconds[0] < seconds[1]
