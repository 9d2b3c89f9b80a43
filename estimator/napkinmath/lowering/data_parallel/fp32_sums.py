"""DeepSpeed's BF16 optimizer: stage 1 whose gradients are summed in fp32, whole on every rank.

16-bit gradients are added to the sums after each backward and zeroed in place, so both stay. The
sums are reduced once a step, and the rank's part of them is what the update reads: nothing is cast.
It runs where parameters are bf16, gradients add up in fp32 (`--reduce-dtype fp32`,
`data_types.grad_accum_dtype`) and the optimizer is on the device. Sources: DeepSpeed 0.19
runtime/bf16_optimizer.py, runtime/engine.py _do_optimizer_sanity_check, runtime/pipe/engine.py
_bf16_reduce_grads.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32
from napkinmath.base.expr import Size, minimum
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Segment, Step, segments
from napkinmath.lowering.data_parallel.flat import elements_of, partitions_loaded, rows_of
from napkinmath.lowering.data_parallel.holders import collectives, is_spread, last_apart
from napkinmath.lowering.data_parallel.zero import gathered_again, states_at_load
from napkinmath.lowering.data_parallel.zero_copies import copies_gathered
from napkinmath.lowering.lifecycle import load_segments, save_segments
from napkinmath.lowering.micro_step import lower_micro_steps
from napkinmath.lowering.optimizer import gradients_freed, lower_update

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.step import Run
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel

SOURCE = "DeepSpeed runtime/bf16_optimizer.py"
# Elements that are reduced at a time, from a flat copy (runtime/engine.py MEMORY_OPT_ALLREDUCE_SIZE).
_REDUCED_AT_ONCE = 500_000_000
MicroSteps = list[tuple[int, list[Segment]]]


def sums_in_fp32(policy: Policy) -> bool:
    """Whether this optimizer runs."""
    parallel = policy.config.parallel
    return (
        parallel.data_parallel is DataParallel.ZERO1
        and parallel.reduce_dtype == "fp32"
        and policy.rule.parameters is BF16
        and not policy.config.offload.optimizer
    )


def fp32_summed_step(model: RankModel, policy: Policy, turns: MicroSteps | None = None) -> Step:
    """One rank's step; `turns` are those of a pipeline's rank."""
    runs = model.runs
    rows = rows_of(runs, policy.config.parallel)
    owned = [row.part for row in rows]
    turns = turns or lower_micro_steps(runs, model.shared, policy)
    load = [
        *load_segments(runs, policy),
        *segments("fp32 gradients", Phase.LOAD, runs, _sums),
        *partitions_loaded(owned),
    ]
    update = lower_update(owned, policy, model.sizes)
    states_at_load(update, {}, owned)
    trained = [run for run in runs if run.trained]
    update.work = [
        *update.work,
        *segments(
            "new parameters", Phase.STEP, trained, lambda run: [(RUN, gathered_again(run, policy))]
        ),
        *copies_gathered(runs, policy, model.sizes),
    ]
    update.zero = segments("zero_grad", Phase.STEP, runs, gradients_freed)
    saved = save_segments(owned, policy)  # every rank writes its partitions as they are
    micro_steps = _reduced_last(turns, runs, policy)
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def _sums(run: Run) -> list[Event]:
    return [
        (
            ALLOC,
            Tensor(f"fp32 sum of {w.tensor.name}", w.axes, FP32, Role.GRADIENTS, w.path, SOURCE),
        )
        for w in run.trained
    ]


def _reduced_last(turns: MicroSteps, runs: list[Run], policy: Policy) -> MicroSteps:
    """Every backward's gradients are added to the sums, which ranks exchange after the last."""
    added = segments("sums of gradients", Phase.BACKWARD, runs, _added)
    *earlier, (_, last) = last_apart([(times, [*row, *added]) for times, row in turns])
    return [*earlier, (1, [*last, *_reduced(runs, policy)])]


def _added(run: Run) -> list[Event]:
    elements = elements_of(run.trained)
    moved = BF16.bits // 8 * elements + 2 * (FP32.bits // 8) * elements
    return [(RUN, Work(None, (Move(moved),), True))] if run.trained else []


def _reduced(runs: list[Run], policy: Policy) -> list[Segment]:
    """The all-reduce of the sums, a flat copy of some of them at a time."""
    parallel, found = policy.config.parallel, list[Segment]()
    for run in (run for run in runs if run.trained):
        dense: Size = 0
        spread: Size = 0
        for weight in run.trained:
            more = FP32.bits // 8 * weight.elements
            if is_spread(weight.path, parallel):
                spread = spread + more
            else:
                dense = dense + more
        costs = collectives("all-reduce", (dense, spread), parallel, "data", overlaps=False)
        if not costs:
            continue
        size = (minimum(elements_of(run.trained), _REDUCED_AT_ONCE),)
        flat = Tensor("sums to reduce", size, FP32, Role.COMMUNICATION, run.block.name, SOURCE)
        events: list[Event] = [(ALLOC, flat), (RUN, Work(None, costs, True)), (FREE, flat)]
        found.append(run.segment(f"reduction of {run.name}", Phase.BACKWARD, events))
    return found
