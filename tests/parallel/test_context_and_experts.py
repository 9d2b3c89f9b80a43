"""Context and expert parallelism: what a rank holds and sends, that books balance, and what cannot
be split said in one line."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from agreement.tiny_configs import TINY
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import (
    ContextParallel,
    DataParallel,
    ParallelConfig,
    PipelineSchedule,
)
from napkinmath.config.train_config import (
    Attention,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.costs import AttentionCost, Collective
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Work
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.replay import replay
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath.timing.collectives import MeshNetwork

ROOT = Path(__file__).resolve().parents[2]
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
MIXTRAL: dict[str, object] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SPREAD = ParallelConfig(
    expert_parallel_size=4, data_parallel_size=4, data_parallel=DataParallel.DDP
)
ONCE = SPREAD.replace(expert_tokens_once=True)


def step_of(
    config: dict[str, object], parallel: ParallelConfig, *, rank: int = 0, **changes: object
) -> Step:
    train = TrainConfig(
        micro_batch_size=2,
        sequence_length=256,
        precision=Precision.BF16,
        clip_gradients=False,
        parallel=parallel,
    ).replace(**changes)
    policy = Policy(train, STACKS[train.stack if "stack" in changes else "hf-bare"])
    return build_step(read_config(config), policy, pipeline_rank=rank)


def collectives(step: Step) -> Counter[tuple[str, str, int]]:
    bind, found = Bindings(step.symbols), Counter[tuple[str, str, int]]()
    for run in step.runs:
        for op in run.block.ops:
            for cost in (*op.costs, *op.backward_costs):
                if isinstance(cost, Collective):
                    found[cost.axis, cost.kind, bind(cost.moved)] += run.count
    return found


@pytest.mark.parametrize("kind", list(ContextParallel))
def test_outside_attention_a_rank_is_one_with_a_shorter_sequence(kind: ContextParallel) -> None:
    whole = step_of(LLAMA, ParallelConfig(), sequence_length=64)
    shared = step_of(LLAMA, ParallelConfig(context_parallel_size=4, context_parallel=kind))
    outside = [
        [
            (op.name, [Bindings(step.symbols)(t.nbytes) for _, t in op.forward])
            for run in step.runs
            for op in run.block.ops
            if "self_attn" not in op.module
        ]
        for step in (whole, shared)
    ]
    assert outside[0] == outside[1]


def test_ring_sends_keys_and_values_around() -> None:
    found = collectives(step_of(LLAMA, ParallelConfig(context_parallel_size=4)))
    both = (
        2 * 2 * 64 * 4 * 16 * 2
    )  # keys and values of a rank: 2 sequences of 64, 4 heads of 16, in bf16
    layers = 4  # torch gathers keys and values at once, and sends fp32 sums of gradients around
    assert found == {
        ("context", "all-gather", 4 * both): 2 * layers,
        ("context", "send", 4 * 2 * both): layers,
    }


@pytest.mark.parametrize(("length", "shown"), [(131072, False), (4096, True)])
def test_a_ring_costs_what_attention_does_not_hide(length: int, shown: bool) -> None:
    """Work grows with the square of the length, what travels with the length itself."""
    cluster = Cluster(hardware=find_hardware("H100"), gpus_per_node=1, num_nodes=8)
    config = TrainConfig(
        micro_batch_size=1,
        sequence_length=length,
        precision=Precision.BF16,
        parallel=ParallelConfig(context_parallel_size=8, data_parallel=DataParallel.FSDP1),
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
        stack="megatron",
    )
    time = estimate("llama-3.1-8b", config, hardware=cluster).time
    assert time is not None
    sent = sum(p.sent.between_nodes_in_line for p in time.phases)
    assert (sent > 0.02 * time.seconds) is shown


def test_a_ring_runs_a_kernel_for_the_keys_of_each_rank() -> None:
    """Its own keys masked, half of the scores with each other rank's: together the work of all of a
    rank's queries, which see half of all keys."""
    step = step_of(LLAMA, ParallelConfig(context_parallel_size=4))
    bind = Bindings(step.symbols)
    op = next(op for run in step.runs for op in run.block.ops if op.name.startswith("sdpa ring"))
    kernels = [cost for cost in op.costs if isinstance(cost, AttentionCost)]
    seen = [(cost.causal, bind(cost.s_q), bind(cost.s_kv)) for cost in kernels]
    assert seen == [(True, 64, 64), *[(False, 64, 32)] * 3]
    assert sum(bind(cost.flops) for cost in kernels) == 4 * 2 * 8 * 64 * (4 * 64 // 2) * 16
    (gather,) = [cost for cost in op.costs if isinstance(cost, Collective)]
    assert gather.beside == tuple(kernels)


def test_transformer_engines_ring_holds_every_step_until_they_are_merged() -> None:
    def made(degree: int) -> int:
        step = step_of(LLAMA, ParallelConfig(context_parallel_size=degree), stack="megatron")
        op = next(
            op for run in step.runs for op in run.block.ops if op.name.startswith("sdpa ring")
        )
        bind = Bindings(step.symbols)
        return sum(bind(t.nbytes) for action, t in op.forward if action == FREE)

    whole = 2 * 256 * (8 + 2 * 4) * 16 * 2  # outputs, keys and values of all positions, in bf16
    assert made(2) == made(4) == whole


def test_ulysses_exchanges_queries_keys_values_and_outputs() -> None:
    found = collectives(
        step_of(
            LLAMA, ParallelConfig(context_parallel_size=4, context_parallel=ContextParallel.ULYSSES)
        )
    )
    query, key = 2 * 64 * 8 * 16 * 2, 2 * 64 * 4 * 16 * 2
    layers = 4
    assert found == {
        ("context", "all-to-all", query): 2 * 2 * layers,
        ("context", "all-to-all", key): 2 * 2 * layers,
    }


def test_experts_are_spread_and_tokens_travel() -> None:
    spread = ParallelConfig(
        expert_parallel_size=4, data_parallel_size=4, data_parallel=DataParallel.DDP
    )
    step = step_of(MIXTRAL, spread)
    bind = Bindings(step.symbols)
    experts = [w for run in step.runs for w in run.block.weights if w.kind == "experts"]
    assert {bind(w.axes[0]) for w in experts} == {2}
    rows = 2 * 256 * 2 * 128 * 2  # tokens with two experts each, in bf16
    assert (
        collectives(step)["expert", "all-to-all", rows] == 4 * 4
    )  # there and back, forward and backward, in four layers


@pytest.mark.parametrize("kind", [DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.FSDP2])
def test_an_expert_is_sharded_among_the_ranks_that_hold_it(kind: DataParallel) -> None:
    """Of 8 ranks with experts spread over 4, two hold the same experts: each has half of their
    states, an eighth of all else's."""
    step = step_of(
        MIXTRAL, ParallelConfig(expert_parallel_size=4, data_parallel_size=8, data_parallel=kind)
    )
    bind = Bindings(step.symbols)
    weights = [(w, run.count) for run in step.runs for w in run.block.weights if w.trainable]
    experts = sum(count * bind(w.elements) for w, count in weights if w.kind == "experts")
    others = sum(count * bind(w.elements) for w, count in weights if w.kind != "experts")
    rows = sum(
        s.repeat * bind(t.nbytes)
        for s in (*step.update.load, *step.update.states)
        for a, t in s.events
        if a == ALLOC and t.role is Role.OPTIMIZER
    )
    each = (
        4 if kind is not DataParallel.FSDP2 else 2
    )  # ZeRO's states are fp32, FSDP's of the type of its bf16 parameters
    assert rows == pytest.approx(2 * each * (experts / 2 + others / 8), rel=1e-3)


@pytest.mark.parametrize("kind", [DataParallel.DDP, DataParallel.ZERO1, DataParallel.FSDP2])
def test_gradients_of_an_expert_are_summed_among_the_ranks_that_hold_it(kind: DataParallel) -> None:
    step = step_of(
        MIXTRAL, ParallelConfig(expert_parallel_size=4, data_parallel_size=8, data_parallel=kind)
    )
    bind = Bindings(step.symbols)
    sent: Counter[tuple[str, int]] = Counter()
    for _, segments in step.micro_steps:
        for segment in segments:
            for action, work in segment.events:
                if action == RUN and isinstance(work, Work) and segment.phase is Phase.BACKWARD:
                    for cost in work.costs:
                        if isinstance(cost, Collective) and cost.kind in (
                            "all-reduce",
                            "reduce-scatter",
                        ):
                            sent[cost.axis, cost.ranks] += segment.repeat * bind(cost.moved)
    gradients = [(g, run.count) for run in step.runs for g in run.block.gradients]
    experts = sum(count * bind(g.nbytes) for g, count in gradients if "experts" in g.module)
    others = sum(count * bind(g.nbytes) for g, count in gradients if "experts" not in g.module)
    axis = "data" if kind is DataParallel.DDP else "shard"
    assert set(sent) == {(axis, 8), (f"expert {axis}", 2)}
    assert sent[f"expert {axis}", 2] == pytest.approx(experts, rel=1e-3)
    assert sent[axis, 8] == pytest.approx(others, rel=1e-2)


@pytest.mark.parametrize("kind", [DataParallel.ZERO3, DataParallel.FSDP1])
def test_engines_that_hold_the_same_on_every_rank_refuse_spread_experts(kind: DataParallel) -> None:
    with pytest.raises(
        InputError,
        match=f"{kind.value} does not spread experts over ranks; use fsdp2, zero1, zero2 or ddp",
    ):
        step_of(
            MIXTRAL,
            ParallelConfig(expert_parallel_size=4, data_parallel_size=8, data_parallel=kind),
        )


def test_ranks_that_share_a_sequence_sum_their_gradients() -> None:
    step = step_of(
        LLAMA,
        ParallelConfig(
            context_parallel_size=4, data_parallel_size=2, data_parallel=DataParallel.DDP
        ),
    )
    ranks = {
        cost.ranks
        for _, segments in step.micro_steps
        for segment in segments
        for _, work in segment.events
        if isinstance(work, Work)
        for cost in work.costs
        if isinstance(cost, Collective) and cost.kind == "all-reduce"
    }
    assert ranks == {8}


@pytest.mark.parametrize(("stack", "travelling"), [("megatron", 2.0), ("automodel", 1.75)])
def test_fused_experts_permute_weigh_and_sum_in_one_kernel_each(
    stack: str, travelling: float
) -> None:
    """DeepEP sends a token to 4 * (1 - (3/4)^2) of four ranks, the other once for each of two
    experts; the second product's output is not kept, since the gate has weighed it."""
    step = step_of(MIXTRAL, SPREAD, stack=stack)
    bind, tokens = Bindings(step.symbols), 2 * 256
    ops = [op for run in step.runs for op in run.block.ops if "experts" in op.module]
    names = Counter(op.name for op in ops)
    assert names["permute"] == names["unpermute"] == names["weighted activation"] == 1
    assert names["sort chunks"] == (2 if stack == "megatron" else 0)
    sent = next(op for op in ops if op.name == "all-to-all")
    assert bind(sent.outputs[0].axes[0]) == travelling * tokens
    kept = [tensor.name for op in ops for tensor in op.saves]
    assert kept.count("expert output") == 1
    timeline = simulate(step)
    assert replay(timeline).peak_allocated >= timeline.peak().nbytes


def test_tokens_that_travel_once_take_less_of_the_network() -> None:
    cluster = Cluster(hardware=find_hardware("H100"), gpus_per_node=8, num_nodes=4)
    spread = ParallelConfig(
        expert_parallel_size=32, data_parallel_size=32, data_parallel=DataParallel.FSDP2
    )
    network = MeshNetwork(cluster, spread)
    each, once = (Collective("all-to-all", 1 << 30, ranks=32, axis="expert") for _ in range(2))
    once.choices = 8
    long, short = (network.seconds(cost, Bindings({})) for cost in (each, once))
    # to 4 * (1 - (3/4)^8) = 3.6 nodes, not to 8 experts
    assert short / long == pytest.approx(3.6 / 8, rel=0.15)
    once.limit = (4, 2)  # groups of experts a token's lie in: to two nodes, nearly always
    assert network.seconds(once, Bindings({})) / long == pytest.approx(2 / 8, rel=0.15)
    once.limit = (16, 8)  # groups share nodes: as without
    assert network.seconds(once, Bindings({})) == short


def test_groups_of_deepseeks_router_bound_the_nodes_reached() -> None:
    """DeepSeek-V3 sends a token to four of eight nodes at most (arXiv 2412.19437 section 2.1.2);
    GLM 4.5 has one group."""
    limits = {
        name: {
            cost.limit
            for run in step.runs
            for op in run.block.ops
            for cost in op.costs
            if isinstance(cost, Collective) and cost.kind == "all-to-all"
        }
        for name in ("deepseek_v3", "glm4_moe")
        for step in [step_of(TINY[name], ONCE, stack="megatron")]
    }
    config = TINY["deepseek_v3"]
    assert limits == {
        "deepseek_v3": {(config["n_group"], config["topk_group"])},
        "glm4_moe": {None},
    }


def test_tokens_travel_once_by_the_flag_where_the_stack_can() -> None:
    for spread, stack in ((ONCE, "megatron"), (SPREAD, "automodel")):
        step = step_of(MIXTRAL, spread, stack=stack)
        sent = next(op for run in step.runs for op in run.block.ops if op.name == "all-to-all")
        assert Bindings(step.symbols)(sent.outputs[0].axes[0]) == 1.75 * 2 * 256
    with pytest.raises(InputError, match="--stack megatron"):
        step_of(MIXTRAL, ONCE, stack="hf")


def test_the_busiest_rank_needs_more() -> None:
    def peak(**fields: float) -> int:
        spread = ParallelConfig(
            expert_parallel_size=4, data_parallel_size=4, data_parallel=DataParallel.DDP, **fields
        )
        return simulate(step_of(MIXTRAL, spread, sequence_length=2048)).peak().nbytes

    assert peak() < peak(expert_imbalance=1.5) < peak(expert_imbalance=2.0)
    assert peak(expert_capacity=1.5) == peak(expert_imbalance=1.5)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(
            context_parallel_size=2,
            tensor_parallel_size=2,
            sequence_parallel=True,
            pipeline_parallel_size=2,
        ),
        ParallelConfig(
            context_parallel_size=2,
            context_parallel=ContextParallel.ULYSSES,
            pipeline_parallel_size=4,
        ),
        ParallelConfig(
            pipeline_parallel_size=2,
            virtual_pipeline_size=2,
            pipeline_schedule=PipelineSchedule.INTERLEAVED,
            tensor_parallel_size=4,
            sequence_parallel=True,
        ),
        ParallelConfig(pipeline_parallel_size=2, pipeline_schedule=PipelineSchedule.ZERO_BUBBLE),
        ParallelConfig(pipeline_parallel_size=4, pipeline_schedule=PipelineSchedule.NAIVE),
    ],
    ids=[
        "ring, tensor, pipeline",
        "ulysses, pipeline",
        "interleaved, tensor",
        "zero bubble",
        "naive",
    ],
)
def test_books_balance_on_every_rank(parallel: ParallelConfig) -> None:
    for rank in range(parallel.pipeline_parallel_size):
        timeline = simulate(step_of(LLAMA, parallel, rank=rank, gradient_accumulation_steps=4))
        counts: dict[int, int] = {}
        for segment, _, action, index in timeline.events():
            if action in "+-":
                counts[index] = counts.get(index, 0) + (1 if action == "+" else -1)
            elif action == "=":
                index, new = segment.pairs[index]
                counts[index] = counts.get(index, 0) - 1
                counts[new] = counts.get(new, 0) + 1
            assert action == "!" or counts[index] >= 0, (segment.name, timeline.tensors[index].name)
        assert replay(timeline).peak_allocated >= timeline.peak().nbytes


@pytest.mark.parametrize(
    ("parallel", "changes", "said"),
    [
        (
            ParallelConfig(tensor_parallel_size=3),
            {},
            (
                "num_attention_heads=8 of llama does not divide by tensor_parallel_size=3; use 1, 2"
                " or 4"
            ),
        ),
        (
            ParallelConfig(pipeline_parallel_size=8),
            {},
            "pipeline_parallel_size=8 leaves stages without layers: the model has 4",
        ),
        (
            ParallelConfig(
                pipeline_parallel_size=2,
                virtual_pipeline_size=2,
                pipeline_schedule=PipelineSchedule.INTERLEAVED,
            ),
            {"gradient_accumulation_steps": 3},
            "num_micro_batches=3 is not a multiple of pipeline_parallel_size=2",
        ),
        (
            ParallelConfig(context_parallel_size=3),
            {},
            (
                "sequence_length=256 does not divide into two parts for each of 3 context-parallel"
                " ranks"
            ),
        ),
        (
            ParallelConfig(context_parallel_size=2),
            {"attention": Attention.EAGER},
            "needs a fused attention kernel",
        ),
        (
            ParallelConfig(context_parallel_size=16, context_parallel=ContextParallel.ULYSSES),
            {},
            "Ulysses exchanges 8 attention heads",
        ),
        (
            ParallelConfig(
                expert_parallel_size=2, data_parallel_size=2, data_parallel=DataParallel.DDP
            ),
            {},
            "llama has none",
        ),
    ],
)
def test_what_cannot_be_split_is_one_line(
    parallel: ParallelConfig, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as error:
        step_of(LLAMA, parallel, **changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_experts_that_do_not_divide_are_one_line() -> None:
    with pytest.raises(
        InputError,
        match=(
            "num_experts=8 of mixtral does not divide by expert_parallel_size=3; use one of 1, 2,"
            " 4, 8"
        ),
    ):
        step_of(
            MIXTRAL,
            ParallelConfig(
                expert_parallel_size=3, data_parallel_size=3, data_parallel=DataParallel.DDP
            ),
        )


@pytest.mark.parametrize("family", ["mamba2", "olmo2"])
def test_a_family_that_cannot_be_split_says_so(family: str) -> None:
    from agreement.tiny_configs import TINY

    with pytest.raises(
        InputError, match=r"cannot be split by tensor parallelism: .*; use tensor_parallel_size=1"
    ):
        step_of(TINY[family], ParallelConfig(tensor_parallel_size=2))


@pytest.mark.slow
def test_sixteen_thousand_ranks_cost_what_two_hundred_do() -> None:
    """Counted in calls of functions; `benchmarks/speed/parallel_speed.py` has the seconds."""

    def calls(data: int) -> int:
        counted = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        parallel = ParallelConfig(
            tensor_parallel_size=8,
            sequence_parallel=True,
            pipeline_parallel_size=16,
            data_parallel_size=data,
            data_parallel=DataParallel.DDP,
            num_micro_batches=32,
        )
        sys.setprofile(count)
        try:
            e = estimate(
                "llama-3.1-405b",
                stack="megatron",
                hardware="H100-80",
                sequence_length=8192,
                parallel=parallel,
            )
            assert e.memory.allocated.value and e.time is not None and e.time.seconds
        finally:
            sys.setprofile(None)
        assert e.config.parallel.world_size == 128 * data
        return counted

    calls(2)  # what is imported and read once
    assert calls(128) <= 1.05 * calls(2)
