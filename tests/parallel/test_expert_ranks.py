"""Experts with tensor-parallel ranks of their own (ETP): who holds an expert, who shards its states,
and what travels."""

from __future__ import annotations

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.inputs.jobs import priced
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import ALLOC, Role, Tensor
from napkinmath.ir.step import Step
from napkinmath.lowering.data_parallel.holders import data_ranks, replica_ranks, shard_ranks
from napkinmath.memory.replay import replay
from napkinmath.memory.simulate import simulate
from napkinmath.timing.collectives import MeshNetwork
from parallel.test_context_and_experts import LLAMA, MIXTRAL, collectives, step_of

EXPERTS, WIDTH, HIDDEN, LAYERS = 8, 192, 128, 4
ROWS = 2 * 256 * 2  # sequences x tokens x experts of a token


def mesh(tensor: int, data: int, expert: int, within: int = 0, **changes: object) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        data_parallel_size=data,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=within,
        data_parallel=DataParallel.ZERO1,
    ).replace(**changes)


def held(step: Step) -> int:
    """Elements of experts on one rank."""
    bind = Bindings(step.symbols)
    return sum(
        run.count * bind(weight.elements)
        for run in step.runs
        for weight in run.block.weights
        if weight.kind == "experts"
    )


@pytest.mark.parametrize(
    ("tensor", "data", "context", "expert", "within"),
    [
        (1, 8, 1, 4, 0),
        (2, 4, 1, 8, 1),
        (4, 1, 1, 4, 1),
        (4, 2, 1, 4, 2),
        (2, 2, 2, 4, 1),
        (1, 8, 1, 4, 2),
    ],
)
@pytest.mark.parametrize("kind", [DataParallel.ZERO1, DataParallel.DDP, DataParallel.FSDP2])
def test_experts_of_all_ranks_are_the_models(
    tensor: int, data: int, context: int, expert: int, within: int, kind: DataParallel
) -> None:
    """Every copy is spread over expert and expert tensor ranks, and the copies are those that sum its
    gradient."""
    parallel = mesh(tensor, data, expert, within, context_parallel_size=context, data_parallel=kind)
    step = step_of(MIXTRAL, parallel, stack="megatron")
    whole = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH
    copies = data_ranks(parallel, spread=True)
    assert held(step) * parallel.world_size == whole * copies
    assert shard_ranks(parallel, spread=True) * replica_ranks(parallel, spread=True) == copies


@pytest.mark.parametrize("within", [0, 1])
@pytest.mark.parametrize("stack", ["hf-bare", "megatron", "automodel"])
def test_without_tensor_ranks_an_expert_has_none_of_its_own(within: int, stack: str) -> None:
    steps = [step_of(MIXTRAL, mesh(1, 8, 4, each), stack=stack) for each in (0, within)]
    assert collectives(steps[0]) == collectives(steps[1])
    assert simulate(steps[0]).peak().nbytes == simulate(steps[1]).peak().nbytes


def test_the_default_is_the_tensor_ranks() -> None:
    steps = [step_of(MIXTRAL, mesh(2, 4, 4, each), stack="megatron") for each in (0, 2)]
    assert collectives(steps[0]) == collectives(steps[1])
    assert held(steps[0]) == held(steps[1])


@pytest.mark.parametrize("stack", ["hf-bare", "megatron"])
def test_a_tensor_rank_sends_its_share_of_the_tokens(stack: str) -> None:
    """A quarter of the rows each way, forward and backward, in four layers; nothing is gathered
    among tensor ranks for whole experts."""
    found = collectives(step_of(MIXTRAL, mesh(4, 2, 8, 1), stack=stack))
    assert found["expert", "all-to-all", ROWS // 4 * HIDDEN * 2] == 4 * LAYERS
    assert not [key for key in found if key[0] == "expert tensor"]


def test_rows_are_gathered_among_the_ranks_that_share_an_expert() -> None:
    found = collectives(step_of(MIXTRAL, mesh(4, 2, 4, 2), stack="megatron"))
    sent = ROWS // 4 * HIDDEN * 2
    assert found["expert", "all-to-all", sent] == 4 * LAYERS
    # gathered before, summed behind the products; the other way round in the backward
    assert found["expert tensor", "all-gather", 2 * sent] == 2 * LAYERS
    assert found["expert tensor", "reduce-scatter", 2 * sent] == 2 * LAYERS


def test_tokens_are_gathered_on_all_ranks_of_the_experts() -> None:
    """A rank's tokens to the other seven, each once, and the sums of all outputs back: the products
    see the same rows as by all-to-all."""
    gathered = mesh(4, 2, 4, 2, expert_tokens_gathered=True)
    step = step_of(MIXTRAL, gathered, stack="megatron")
    found, tokens = collectives(step), 2 * 256 // 4 * HIDDEN * 2
    assert found["expert tensor", "all-gather", 8 * tokens] == 2 * LAYERS
    assert found["expert tensor", "reduce-scatter", 8 * tokens] == 2 * LAYERS
    assert not [kind for _, kind, _ in found if kind == "all-to-all"]
    bind = Bindings(step.symbols)
    (up, _) = (op for run in step.runs for op in run.block.ops if op.name == "grouped_mm")
    assert bind(up.inputs[0].axes[0]) == ROWS // 4 * 2
    with pytest.raises(InputError, match="--ep-all-gather"):
        step_of(MIXTRAL, gathered, stack="hf-bare")
    with pytest.raises(InputError, match="exclude each other"):
        gathered.replace(expert_tokens_once=True)


def test_products_of_an_expert_are_as_large_as_its_ranks_make_them() -> None:
    """Whole experts on an eighth of the ranks do the same work as an eighth of each on all tokens."""

    def work(parallel: ParallelConfig) -> int:
        step = step_of(MIXTRAL, parallel, stack="megatron")
        bind = Bindings(step.symbols)
        return sum(
            run.count * bind(cost.flops)
            for run in step.runs
            for op in run.block.ops
            if "experts" in op.module
            for cost in op.costs
        )

    assert work(mesh(4, 2, 8, 1)) == work(mesh(4, 2, 4, 2)) == work(mesh(4, 2, 2))


def test_states_of_experts_are_sharded_over_their_own_data_parallel_ranks() -> None:
    """Of 16 ranks two hold the same experts, and four the same of all else."""
    step = step_of(MIXTRAL, mesh(4, 4, 8, 1), stack="megatron")
    bind = Bindings(step.symbols)
    weights = [(w, run.count) for run in step.runs for w in run.block.weights if w.trainable]
    others = sum(count * bind(w.elements) for w, count in weights if w.kind != "experts")
    states = sum(
        s.repeat * bind(t.nbytes)
        for s in (*step.update.load, *step.update.states)
        for a, t in s.events
        if a == ALLOC and isinstance(t, Tensor) and t.role is Role.OPTIMIZER
    )
    assert states == pytest.approx(8 * (held(step) / 2 + others / 4), rel=1e-3)


def test_whole_experts_stay_in_the_node_where_split_ones_leave_it() -> None:
    cluster = Cluster(hardware=find_hardware("H100"), gpus_per_node=8, num_nodes=4)
    cost = Collective("all-to-all", 1 << 28, ranks=8, axis="expert")
    nodes = [
        MeshNetwork(cluster, mesh(4, 8, 8, within)).fabric_of(cost).nodes for within in (1, 2, 4)
    ]
    assert nodes == [1, 2, 4]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("parallel", [mesh(4, 2, 4, 2), mesh(4, 2, 8, 1), mesh(2, 4, 4)])
def test_books_balance(parallel: ParallelConfig, once: bool) -> None:
    spread = parallel.replace(expert_tokens_once=once)
    timeline = simulate(step_of(MIXTRAL, spread, stack="megatron"))
    assert replay(timeline).peak_allocated >= timeline.peak().nbytes


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (
            {"expert_parallel_size": 8, "data_parallel_size": 4},
            "use one of 1, 2 or 4, or expert_tensor_parallel_size=1",
        ),
        ({"expert_tensor_parallel_size": 3, "data_parallel_size": 4}, "does not divide 8 ranks"),
        (
            {"expert_tensor_parallel_size": 1, "sequence_parallel": False},
            "add sequence_parallel",
        ),
        ({"expert_tensor_parallel_size": 1, "data_parallel": DataParallel.NONE}, "zero1 or ddp"),
        ({"expert_tensor_parallel_size": -1}, "expert_tensor_parallel_size=-1"),
    ],
)
def test_ranks_that_cannot_be_are_refused(parallel: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        mesh(2, 1, 1).replace(**parallel)


def test_a_width_that_does_not_divide_is_refused() -> None:
    odd = {**MIXTRAL, "intermediate_size": 190}
    with pytest.raises(InputError, match=r"intermediate_size=190 .* expert_tensor_parallel_size=4"):
        step_of(odd, mesh(4, 2, 2, 4).replace(tensor_parallel_size=2, data_parallel_size=4))


def test_dense_models_have_no_experts_to_split() -> None:
    with pytest.raises(InputError, match="expert_tensor_parallel_size=1 spreads experts"):
        step_of(LLAMA, mesh(4, 2, 1, 1), stack="megatron")


@pytest.mark.parametrize(
    ("model", "sums"),
    [("gemma-4-26b-a4b", 3 * 30 + 1), ("qwen3-30b-a3b", 2 * 48 + 1)],
)
def test_experts_on_shares_of_their_width_are_summed_once_a_layer(model: str, sums: int) -> None:
    """Attention, feed-forward and, beside it in Gemma 4, the experts; once for the embeddings."""
    given = {"model": model, "gpus": "2xh100", "tp": 2, "sequence_parallel": False}
    step = priced(given, [])[0].step
    forward = sum(
        run.count
        for run in step.runs
        for op in run.block.ops
        for cost in op.costs
        if isinstance(cost, Collective) and cost.kind == "all-reduce"
    )
    assert forward == sums
