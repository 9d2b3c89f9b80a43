"""Collectives that run beside products or other micro-batches: what the flags, stacks and schedules
change, and what turns them off."""

from __future__ import annotations

import pytest
from napkinmath import Estimate, estimate
from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.ir.costs import Collective
from napkinmath.ir.ledger import Phase
from napkinmath.timing.overlap import COMMUNICATION

# Long enough that the host does not set the pace.
DENSE = dict(gpus="8xH100", tp=8, ctx=8192, precision="bf16")
EXPERTS = dict(gpus="64xH100", ep=32, pp=2, ctx=1024, precision="bf16", stack="megatron")


def seconds(e: Estimate) -> float:
    assert e.time is not None
    return e.time.seconds


def priced(model: str, **options: object) -> Estimate:
    return estimate(model, **options)  # type: ignore[arg-type]


def test_tensor_parallel_overlap_follows_the_stack_and_the_flag() -> None:
    megatron, nemo = (priced("llama-3.1-8b", stack=s, **DENSE) for s in ("megatron", "nemo"))
    assert seconds(nemo) < seconds(megatron)
    hidden = priced("llama-3.1-8b", stack="megatron", tp_comm_overlap=True, **DENSE)
    shown = priced("llama-3.1-8b", stack="nemo", tp_comm_overlap=False, **DENSE)
    assert seconds(hidden) < seconds(megatron)
    assert seconds(nemo) < seconds(shown)


def test_torch_overlaps_where_it_compiles() -> None:
    bare = dict(DENSE, stack="hf-bare")
    with pytest.raises(InputError, match="add compile"):
        seconds(priced("llama-3.1-8b", tp_comm_overlap=True, **bare))
    plain = priced("llama-3.1-8b", compile=True, **bare)
    hidden = priced("llama-3.1-8b", compile=True, tp_comm_overlap=True, **bare)
    assert seconds(hidden) < seconds(plain)
    assert not any("--compile" in finding.text for finding in hidden.findings)


def test_torchs_compiler_fuses_no_cast_and_no_sum_of_several_gradients() -> None:
    """What it hides of one layer, forward and backward: the reduction of the gradient that queries,
    keys and values sum stays, and with a scale a row every gather does."""
    found = {}
    for precision in ("bf16", "fp8-row"):
        options = dict(DENSE, stack="torchtitan", compile=True, tp_comm_overlap=True)
        e = priced("llama-3.1-8b", **{**options, "precision": precision})
        layer = next(run.block for run in e.step.runs if run.count > 1)
        costs = [c for op in layer.ops for c in (*op.costs, *op.backward_costs)]
        found[precision] = [
            (c.kind, bool(c.beside and c.reach))
            for c in costs
            if isinstance(c, Collective) and c.axis == "tensor"
        ]
    gather, sums = "all-gather", "reduce-scatter"
    attention = [(gather, True), (sums, False), (sums, True), (gather, True)]
    assert found["bf16"] == attention * 2
    assert found["fp8-row"] == [(gather, False), (sums, False), (sums, True), (gather, False)] * 2


@pytest.mark.parametrize(
    ("field", "needs"),
    [
        ("tensor_overlap", "sequence_parallel"),
        ("expert_overlap", "expert_parallel_size"),
        ("expert_tokens_once", "expert_parallel_size"),
    ],
)
def test_overlap_without_what_it_hides_is_refused(field: str, needs: str) -> None:
    with pytest.raises(InputError, match=needs):
        ParallelConfig(**{field: True})


def test_expert_all_to_alls_hide_with_dualpipe_or_the_flag() -> None:
    options = dict(EXPERTS, micro_batches=8)
    plain = priced("mixtral-8x22b", **{**options, "ep": 8})
    hidden = priced("mixtral-8x22b", ep_comm_overlap=True, **{**options, "ep": 8})
    assert plain.time is not None
    assert hidden.time is not None
    assert hidden.time.share(COMMUNICATION) < plain.time.share(COMMUNICATION)
    computing = plain.time.seconds * (1 - plain.time.share(COMMUNICATION))
    assert computing * 0.99 < hidden.time.seconds < plain.time.seconds
    schedules = {
        schedule: priced("mixtral-8x22b", pp_schedule=schedule, **{**options, "ep": 8})
        for schedule in ("1f1b", "dualpipe")
    }
    hides = {name: e.config.parallel.hides_experts for name, e in schedules.items()}
    assert hides == {"1f1b": False, "dualpipe": True}


def test_new_parameters_are_gathered_beside_the_next_forward_in_nemo() -> None:
    options = dict(gpus="64xH100", zero=1, ctx=4096, precision="bf16")
    found = [priced("llama-3.1-8b", stack=s, **options) for s in ("megatron", "nemo")]
    gathers = [
        {
            segment.phase
            for _, row in e.timeline.segments.rows
            for segment in row
            for kernel in segment.kernels
            if kernel.name == "all-gather"
        }
        for e in found
    ]
    assert gathers == [{Phase.STEP}, {Phase.FORWARD}]
    assert seconds(found[1]) < seconds(found[0])
