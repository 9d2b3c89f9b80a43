"""FP8 as Transformer Engine runs it: what is cast when, what is kept, and that it pays."""

from __future__ import annotations

import pytest
from napkinmath import TrainConfig, estimate
from napkinmath.base.dtypes import BF16, FP8_E4M3, DType
from napkinmath.base.expr import Bindings
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import Precision, RecomputeConfig, RecomputeKind
from napkinmath.ir.costs import Collective, Gemm, Move
from napkinmath.ir.ledger import ALLOC, RUN, Op, Phase
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.transformer_engine import NAME
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
TOKENS, HIDDEN, WIDTH = 2 * 384, 256, 768
DISTRIBUTED = ParallelConfig(data_parallel=DataParallel.ZERO1, data_parallel_size=2)
MESHES = {"one GPU": ParallelConfig(), "distributed optimizer": DISTRIBUTED}


def step_of(
    precision: Precision = Precision.FP8,
    parallel: ParallelConfig = MESHES["one GPU"],
    steps: int = 1,
) -> Step:
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=384,
        precision=precision,
        parallel=parallel,
        gradient_accumulation_steps=steps,
    )
    return build_step(read_config(LLAMA), Policy(config, find_stack("megatron")))


def layer(step: Step) -> list[Op]:
    return next(run for run in step.runs if run.stage.checkpointed).block.ops


def products(ops: list[Op]) -> list[DType]:
    """Types of the products with weights of a layer, both ways."""
    return [
        cost.dtype
        for op in ops
        if op.inputs[1:] and op.inputs[1].weight is not None
        for cost in (*op.costs, *op.backward_costs)
        if isinstance(cost, Gemm)
    ]


def test_every_product_of_a_layer_runs_in_fp8_and_the_head_does_not() -> None:
    step = step_of()
    assert products(layer(step)) == [FP8_E4M3] * 7 * 3
    head = products(step.runs[-1].block.ops)
    assert head and FP8_E4M3 not in head


def test_inputs_are_kept_in_fp8_once_for_all_that_read_them() -> None:
    step = step_of()
    bind = Bindings(step.symbols)
    kept = [op.saves for op in layer(step) if op.name == NAME]
    assert all(len(saved) == 1 and saved[0].dtype is FP8_E4M3 for saved in kept)
    sizes = [bind(tensor.nbytes) for tensor in {saved[0] for saved in kept}]
    assert sorted(sizes) == sorted(TOKENS * x for x in (HIDDEN, HIDDEN, HIDDEN, WIDTH))


def test_an_input_is_cast_where_no_norm_has_done_so() -> None:
    """The norms write FP8 themselves; the attention's output and the gated activation are cast."""
    step = step_of()
    bind = Bindings(step.symbols)
    moved = [
        sum(bind(cost.moved) for cost in op.costs) for op in layer(step) if op.name == "cast to FP8"
    ]
    assert sorted(moved) == [0, 0, 4 * TOKENS * HIDDEN, 4 * TOKENS * WIDTH]


@pytest.mark.parametrize("parallel", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("steps", [1, 4])
def test_weights_are_cast_once_a_step_and_kept_in_both_layouts(
    parallel: ParallelConfig, steps: int
) -> None:
    step = step_of(parallel=parallel, steps=steps)
    bind = Bindings(step.symbols)
    in_fp8 = sum(
        run.count * bind(w.elements)
        for run in step.runs
        for w in run.block.weights
        if w.kind == "linear"
    )
    held = sum(
        segment.repeat * bind(tensor.nbytes)
        for segment in step.load
        for action, tensor in segment.events
        if action == ALLOC and tensor.dtype is FP8_E4M3
    )
    assert held == 2 * in_fp8
    cast = sum(
        segment.repeat * bind(cost.moved)
        for segment in step.update.work
        if segment.name.startswith("weights to FP8")
        for action, work in segment.events
        if action == RUN
        for cost in work.costs
    )
    assert cast == 4 * in_fp8


def test_weights_in_fp8_alone_take_the_place_of_16_bits() -> None:
    """NeMo's FP8 recipes gather parameters in FP8 (fp8_param_gather): no copy beside 16 bits."""
    stack = find_stack("megatron")
    assert not stack.model.fp8_weights_alone and find_stack("nemo").model.fp8_weights_alone
    alone = stack.replace(model=stack.model.replace(fp8_weights_alone=True))
    config = TrainConfig(micro_batch_size=1, sequence_length=64, precision=Precision.FP8)
    found = [
        [
            t.dtype
            for s in build_step(read_config(LLAMA), Policy(config, row)).load
            for _, t in s.events
        ]
        for row in (stack, alone)
    ]
    assert FP8_E4M3 in found[0] and [d for d in found[0] if d is not FP8_E4M3] == found[1]


def test_ranks_gather_and_keep_shares_of_the_input_in_fp8() -> None:
    mesh = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)
    narrow, wide = (step_of(p, mesh) for p in (Precision.FP8, Precision.BF16))
    bind = Bindings(narrow.symbols)

    def gathered(step: Step, *, backward: bool) -> list[int]:
        return [
            bind(cost.moved)
            for op in layer(step)
            for cost in (op.backward_costs if backward else op.costs)
            if isinstance(cost, Collective) and cost.kind == "all-gather"
        ]

    assert [2 * x for x in gathered(narrow, backward=False)] == gathered(wide, backward=False)
    # gathered again for the weight's gradient in FP8, the gradient of what was scattered in bf16
    again = sorted(gathered(wide, backward=True))
    assert sorted(gathered(narrow, backward=True)) == sorted([again[0] // 2] * 2 + again[:2])
    entering = {
        op.saves[0] for op in layer(narrow) if op.name == NAME and op.module.endswith("up_proj")
    }
    assert [bind(t.nbytes) for t in entering] == [TOKENS * HIDDEN // 2]


@pytest.mark.parametrize("stack", ["hf", "hf-bare"])
def test_other_stacks_cast_as_torchao_does(stack: str) -> None:
    config = TrainConfig(micro_batch_size=1, sequence_length=128, precision=Precision.FP8)
    step = build_step(read_config(LLAMA), Policy(config, find_stack(stack)))
    assert NAME not in {op.name for op in layer(step)}
    assert not any(getattr(t, "dtype", None) is FP8_E4M3 for s in step.load for _, t in s.events)


FULL = RecomputeConfig(kind=RecomputeKind.FULL)


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200", "L40S"])
@pytest.mark.parametrize(
    "mesh",
    [
        ParallelConfig(data_parallel=DataParallel.ZERO1, data_parallel_size=8),
        ParallelConfig(tensor_parallel_size=8, sequence_parallel=True),
    ],
    ids=["data", "tensor"],
)
@pytest.mark.parametrize("recompute", [RecomputeConfig(), FULL], ids=["kept", "recomputed"])
def test_fp8_is_never_slower_where_its_rate_is_twice_that_of_bf16(
    gpu: str, mesh: ParallelConfig, recompute: RecomputeConfig
) -> None:
    """On the device: its kernels are more, so a step that waits for the host is slower."""
    machines = Cluster(hardware=find_hardware(gpu), gpus_per_node=8)
    seconds = []
    for precision in (Precision.FP8, Precision.BF16):
        config = TrainConfig(
            micro_batch_size=1,
            sequence_length=8192,
            precision=precision,
            parallel=mesh,
            recompute=recompute,
            stack="megatron",
        )
        time = estimate("llama-3.1-8b", config, hardware=machines).time
        assert time is not None
        seconds.append(sum(phase.device_s for phase in time.phases))
    assert seconds[0] < seconds[1]


def test_a_cast_passes_over_the_gradient_once() -> None:
    step = step_of()
    bind = Bindings(step.symbols)
    for op in layer(step):
        if op.name == NAME:
            (cast,) = [cost for cost in op.backward_costs if isinstance(cost, Move)]
            assert bind(cast.moved) == 4 * TOKENS * bind(op.inputs[1].axes[0])


def test_megatron_shards_16_bits_and_autocasts_nothing() -> None:
    """Megatron-FSDP keeps 2 + 4 + 8 bytes of a parameter apart; fp32 shards under autocast would
    be cast in every operation."""
    step = step_of(parallel=ParallelConfig(data_parallel=DataParallel.FSDP1, data_parallel_size=2))
    assert not {op.name for op in layer(step)} & {"to", "to half"}
    made = [t for s in step.load for action, t in s.events if action == ALLOC]
    assert {t.dtype for t in made if t.name == "flat parameter"} == {BF16}


def test_projections_of_one_input_make_one_gradient() -> None:
    """Megatron's linear_qkv and linear_fc1: no kernel adds up what three and two linears make."""
    config, row = TrainConfig(micro_batch_size=1, sequence_length=128), find_stack("megatron")
    apart = row.replace(model=row.model.replace(joined_projections=False))
    adds = [
        sum(
            segment.repeat
            for _, micro_step in build_step(read_config(LLAMA), Policy(config, stack)).micro_steps
            for segment in micro_step
            if segment.phase is Phase.BACKWARD
            for action, work in segment.events
            if action == RUN and work.op is None
        )
        for stack in (apart, row)
    ]
    assert adds[0] - adds[1] == 2 * 3  # layers; two of q, k, v and one of gate, up
