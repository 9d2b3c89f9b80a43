"""Gradients that end in fp32 buffers: products of linears add to them, all others are added in a
pass of their own."""

from __future__ import annotations

import pytest
from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import STACKS, find_stack
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import Precision, TrainConfig
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Work
from napkinmath.ir.step import Segment, Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import SUMMED_KINDS, Policy
from napkinmath.models.families import read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
MODELS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "biases": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "experts": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4},
}
MESHES = {
    "one GPU": ParallelConfig(),
    "DDP": ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=2),
    "distributed optimizer": ParallelConfig(data_parallel=DataParallel.ZERO1, data_parallel_size=2),
    "tensor": ParallelConfig(tensor_parallel_size=2),
}


def step_of(model: str, mesh: str, *, fused: bool, steps: int = 1, summed_in: str = "auto") -> Step:
    stack = find_stack("megatron")
    stack = stack.replace(optimizer=stack.optimizer.replace(fused_accumulation=fused))
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=128,
        precision=Precision.BF16,
        parallel=MESHES[mesh].replace(reduce_dtype=summed_in),
        gradient_accumulation_steps=steps,
    )
    return build_step(read_config(MODELS[model]), Policy(config, stack))


def backward_works(step: Step) -> list[tuple[int, Work]]:
    """What a micro-step's backward runs, and how often."""
    return [
        (segment.repeat, work)
        for segment in step.micro_steps[0][1]
        if segment.phase is Phase.BACKWARD
        for action, work in segment.events
        if action == RUN
    ]


def passed(step: Step) -> int:
    """Bytes that the backward moves outside of its nodes: sums of gradients."""
    bind = Bindings(step.symbols)
    return sum(
        times * bind(cost.moved)
        for times, work in backward_works(step)
        if work.op is None
        for cost in work.costs
        if isinstance(cost, Move)
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_no_gradient_of_a_linear_is_added_in_a_pass_of_its_own(model: str, mesh: str) -> None:
    fused, apart = (step_of(model, mesh, fused=x) for x in (True, False))
    bind = Bindings(fused.symbols)
    of_linears = {
        w.path: run.count * bind(w.elements)
        for run in fused.runs
        for w in run.trained
        if w.kind in SUMMED_KINDS
    }
    assert of_linears
    # read in 16 bits, fp32 read and written; a tied head's gradient was one of 16-bit sums
    tied = sum(
        6 * run.count * bind(w.elements)
        for run in fused.runs
        for w in run.block.weights
        if w.tied_to and w.kind == "head"
    )
    assert passed(apart) - passed(fused) == 10 * sum(of_linears.values()) + tied


@pytest.mark.parametrize("model", MODELS)
def test_each_products_result_is_an_fp32_sum(model: str) -> None:
    step = step_of(model, "one GPU", fused=True)
    found = [
        cost
        for _, work in backward_works(step)
        for cost in work.costs
        if isinstance(cost, Gemm) and cost.result_bits
    ]
    linears = {w.path for run in step.runs for w in run.block.weights if w.kind in SUMMED_KINDS}
    assert len(found) == len(linears)
    assert {cost.result_bits for cost in found} == {2 * FP32.bits}


@pytest.mark.parametrize("mesh", ["one GPU", "distributed optimizer"])
def test_buffers_of_16_bits_are_widened_for_the_update_alone(mesh: str) -> None:
    """2 bytes a parameter less between steps, and 4 of the rank's part within the update
    (Megatron-LM core/optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads)."""
    step = step_of("llama", mesh, fused=True, summed_in="bf16")
    bind = Bindings(step.symbols)

    def held(segments: list[Segment], name: str, action: str = ALLOC) -> int:
        return sum(
            segment.repeat * bind(t.nbytes)
            for segment in segments
            for what, t in segment.events
            if what == action and t.name.startswith(name)
        )

    trained = sum(run.count * bind(w.elements) for run in step.runs for w in run.trained)
    assert held(step.load, "main gradient") == 2 * trained
    part = trained if mesh == "one GPU" else trained / 2
    for action in (ALLOC, FREE):
        assert held(step.update.work, "fp32 gradient", action) == pytest.approx(4 * part, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_the_empty_gradient_takes_the_memory_of_the_real_one(model: str, steps: int) -> None:
    """Autograd gets a tensor as large (Megatron-LM core/tensor_parallel/layers.py, grad_weight =
    torch.empty), and every one of them ends in the step."""
    fused, apart = (step_of(model, "one GPU", fused=x, steps=steps) for x in (True, False))
    assert made(fused) == made(apart)
    for step in (fused, apart):
        ended = sorted(
            t.name
            for _, segments in step.micro_steps
            for segment in segments
            for action, t in segment.events
            if action == FREE and t.name.startswith("grad of weight")
        )
        assert ended == [name for name in made(step) if name.startswith("grad of weight")]


def made(step: Step) -> list[str]:
    return sorted(
        t.name
        for _, segments in step.micro_steps
        for segment in segments
        for action, t in segment.events
        if action == ALLOC
    )


@pytest.mark.parametrize("stack", [s for s in STACKS.values() if s.optimizer.master_weights])
@pytest.mark.parametrize("precision", [Precision.BF16_AUTOCAST, Precision.BF16_AMP])
def test_weights_with_fp32_masters_are_never_cast(stack: object, precision: Precision) -> None:
    """Such stacks convert the model itself: a 16-bit norm meets 16-bit linears."""
    found = []
    for kind in (precision, Precision.BF16):
        config = TrainConfig(micro_batch_size=1, sequence_length=64, precision=kind)
        step = build_step(read_config(LLAMA), Policy(config, stack))  # type: ignore[arg-type]
        found.append([op.name for run in step.runs for op in run.block.ops])
    assert found[0] == found[1]
