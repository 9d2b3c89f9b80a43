"""What a layer of nanotron keeps, and how its pipelines are cut: by its source's own arithmetic, and
by a module written after models/llama.py whose kernels keep what flash-attn's keep."""

from __future__ import annotations

import pytest
import torch
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import Attention, Precision, TrainConfig
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import ALLOC, Phase, Tensor, Work
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.parallel.stage_order import head_in_layers, layers_per_stage
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config
from torch.nn import functional as F

HIDDEN, HEADS, LENGTH, WIDTH, WORDS = 256, 8, 128, 512, 512
ROW_STATISTICS = 0.02  # reciprocal roots and log-sum-exps in fp32 beside rows of so few elements


def config(kv_heads: int = HEADS) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "vocab_size": WORDS,
        "tie_word_embeddings": True,
    }


def step_of(
    stack: str, *, rows: int = 2, kv_heads: int = HEADS, tensor: int = 1, sequence: bool = True
) -> Step:
    parallel = ParallelConfig(
        tensor_parallel_size=tensor, sequence_parallel=sequence and tensor > 1
    )
    train = TrainConfig(
        micro_batch_size=rows,
        sequence_length=LENGTH,
        precision=Precision.BF16,
        parallel=parallel,
    )
    return build_step(
        read_config(config(kv_heads)), Policy(train, find_stack(stack), sdpa_choice=Attention.FLASH)
    )


def kept(step: Step) -> int:
    """Bytes that a layer's forward leaves."""
    bind = Bindings(step.symbols)
    forward = next(s for s in step.micro_steps[0][1] if s.phase is Phase.FORWARD and s.repeat > 1)
    return sum(
        bind(p.requested) * (1 if action == ALLOC else -1)
        for action, p in forward.events
        if isinstance(p, Tensor)
    )


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_split_layer_keeps(tensor: int, rows: int) -> None:
    """Of bf16 and hidden size: the stream twice and two gathered inputs, the copy of queries, keys
    and values (3), of keys beside values (2), the output (1) and, of several sequences, its copy;
    gate and up, the activation and the product (4 f)."""
    heads = 3 + 2 + 1 + (rows > 1)
    feed = 4 * WIDTH // HIDDEN
    gathered = {"nanotron-2024": 2.0, "nanotron": 2 / tensor}
    for stack, inputs in gathered.items():
        found = kept(step_of(stack, rows=rows, tensor=tensor)) / (rows * LENGTH * HIDDEN * 2)
        whole = 2 / tensor + inputs + (heads + feed) / tensor
        assert found == pytest.approx(whole, rel=ROW_STATISTICS)
    whole = 2 + 2 + (heads + feed) / tensor  # ALL_REDUCE: every rank reads and holds all positions
    found = kept(step_of("nanotron", rows=rows, tensor=tensor, sequence=False))
    assert found / (rows * LENGTH * HIDDEN * 2) == pytest.approx(whole, rel=ROW_STATISTICS)


class _Norm(torch.autograd.Function):
    """flash-attn 2.5 ops/triton/layer_norm.py LayerNormFn: keeps its input and a root a row."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        root = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
        ctx.save_for_backward(x, weight, root)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class _Attention(torch.autograd.Function):
    """flash_attn_interface.py FlashAttnVarlenFunc: keeps q, k, v, the output and a number a row."""

    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[1], q.shape[0]))
        return out

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, gradient, gradient


def layer(x: torch.Tensor, weights: list[torch.Tensor], kv_heads: int) -> torch.Tensor:
    """One rank's LlamaDecoderLayer.forward over x (positions, rows, hidden), rotations in place."""
    length, rows, _ = x.shape
    size = HIDDEN // HEADS
    first, qkv, out, second, gate_up, down = weights
    joint = F.linear(_Norm.apply(x, first), qkv)
    if kv_heads == HEADS:
        split = joint.view(length, rows, 3, HEADS, size).permute(2, 1, 0, 3, 4).contiguous()
        q, k, v = split
    else:
        parts = torch.split(joint, [HEADS * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k, v = (
            part.transpose(0, 1).contiguous().view(rows, length, heads, size)
            for part, heads in zip(parts, (HEADS, kv_heads, kv_heads), strict=True)
        )
    beside = torch.cat([k.unsqueeze(0), v.unsqueeze(0)], dim=0).permute(1, 2, 0, 3, 4).contiguous()
    k, v = torch.split(beside, 1, dim=2)
    attended = _Attention.apply(
        q.view(rows * length, HEADS, size),
        k.view(rows * length, kv_heads, size),
        v.view(rows * length, kv_heads, size),
    )
    attended = attended.contiguous().view(rows, length, HIDDEN).transpose(0, 1)
    x = F.linear(attended, out) + x
    gate, up = torch.split(F.linear(_Norm.apply(x, second), gate_up), WIDTH, dim=-1)
    return F.linear(F.silu(gate) * up, down) + x


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_a_whole_layer_keeps_what_torch_keeps_of_it(rows: int, kv_heads: int) -> None:
    joint = (HEADS + 2 * kv_heads) * (HIDDEN // HEADS)
    shapes = ((HIDDEN,), (joint, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,))
    shapes = (*shapes, (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    weights = [torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    x = torch.zeros(LENGTH, rows, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    own = {w.untyped_storage().data_ptr() for w in weights}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held: no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, weights, kv_heads)
    traced = sum(storage.nbytes() for storage in storages.values())
    seeds = 2 * 512  # two int64 of torch's kernel, in a block each
    assert kept(step_of("nanotron", rows=rows, kv_heads=kv_heads)) - traced in (0, 16, seeds)


def test_a_stage_ends_with_the_layer_that_reaches_its_share() -> None:
    """A head of 50,257 words weighs 2.45 layers of Llama 1B. After a step of nanotron/old_bench (tp 2,
    pp 4) the first stage held 3,479 MiB: 18 bytes of each parameter of seven layers and the
    embedding."""
    head = 50257 * 2048 / (4 * 2048 * 2048 + 3 * 4096 * 2048)
    assert layers_per_stage(24, stages(4), head) == [7, 7, 6, 4]
    assert layers_per_stage(24, stages(8), head) == [4, 3, 3, 4, 3, 3, 4, 0]
    assert layers_per_stage(24, stages(2), head) == [14, 10]
    spec = read_config(config())
    assert head_in_layers(spec, find_stack("megatron")) == 0
    assert head_in_layers(spec, find_stack("nanotron")) == WORDS / (4 * HIDDEN + 3 * WIDTH)
    with pytest.raises(InputError, match="use fewer stages"):
        layers_per_stage(4, stages(4), 100.0)


def stages(count: int) -> ParallelConfig:
    return ParallelConfig(pipeline_parallel_size=count)


def test_a_stage_may_hold_the_head_alone() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=3)
    train = TrainConfig(
        sequence_length=LENGTH,
        precision=Precision.BF16,
        parallel=parallel,
        gradient_accumulation_steps=8,
    )
    policy = Policy(train, find_stack("nanotron"), sdpa_choice=Attention.FLASH)
    spec = read_config({**config(), "vocab_size": 64})  # 0.25 of a layer
    last = build_step(spec, policy, pipeline_rank=2)
    assert layers_per_stage(4, parallel, head_in_layers(spec, policy.stack)) == [2, 1, 1]
    assert layers_per_stage(2, stages(2), 0.1) == [2, 0]
    two = read_config({**config(), "num_hidden_layers": 2, "vocab_size": 64})
    paired = Policy(
        train.replace(parallel=stages(2)), find_stack("nanotron"), sdpa_choice=Attention.FLASH
    )
    alone = build_step(two, paired, pipeline_rank=1)
    linears = [w.path for run in alone.runs for w in run.block.weights if w.kind == "linear"]
    assert linears == [] and any(w.kind == "head" for run in alone.runs for w in run.block.weights)
    assert any(w.kind == "linear" for run in last.runs for w in run.block.weights)


@pytest.mark.parametrize(
    ("stack", "expected"),
    [("nanotron", ("all-reduce", False)), ("megatron", ("reduce-scatter", True))],
)
def test_gradients_are_summed_after_the_last_backward(
    stack: str, expected: tuple[str, bool]
) -> None:
    """trainer.py training_step hands sync_gradients_across_dp reduce_scatter=False, of fp32
    buffers."""
    parallel = ParallelConfig(data_parallel_size=4, data_parallel=DataParallel.ZERO1)
    train = TrainConfig(sequence_length=LENGTH, precision=Precision.BF16, parallel=parallel)
    spec = read_config(config())
    step = build_step(spec, Policy(train, find_stack(stack), sdpa_choice=Attention.FLASH))
    bind = Bindings(step.symbols)
    found = [
        (cost.kind, cost.overlaps, segment.repeat * bind(cost.moved))
        for _, turn in step.micro_steps
        for segment in turn
        for action, work in segment.events
        if isinstance(work, Work)
        for cost in work.costs
        if isinstance(cost, Collective)
    ]
    assert {one[:2] for one in found} == {expected}
    parameters = WORDS * HIDDEN + 4 * (4 * HIDDEN**2 + 3 * HIDDEN * WIDTH + 2 * HIDDEN) + HIDDEN
    assert sum(one[2] for one in found) == 4 * parameters
