"""Megatron-LM's engines: gradients are added to buffers that live through the run, of fp32 but where
they are asked for in 16 bits, and those are what ranks sum.

DistributedDataParallel all-reduces the buffers; the distributed optimizer (`--zero 1` of that
stack) reduce-scatters them, updates a rank's part of the fp32 masters and gathers the new 16-bit
parameters: 6 + 12/d bytes a parameter, 4 + 12/d with buffers of 16 bits. Sources: Megatron-LM
core/distributed/param_and_grad_buffer.py _ParamAndGradBucketGroup.start_grad_sync,
core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from functools import partial

from napkinmath.base.expr import Size, ceil_div
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment, Step, by_block, segments
from napkinmath.lowering.data_parallel.flat import (
    own_partitions,
    partitions_loaded,
    parts_in_place,
)
from napkinmath.lowering.data_parallel.holders import (
    collectives,
    is_spread,
    last_apart,
    with_every_run,
)
from napkinmath.lowering.lifecycle import load_segments, save_segments
from napkinmath.lowering.micro_step import lower_micro_steps
from napkinmath.lowering.optimizer import chosen_optimizer, lower_update

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.costs import Collective, Cost
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel

MicroSteps = list[tuple[int, "list[Segment]"]]


def summed_in_buffers(
    micro_steps: MicroSteps, runs: list[Run], policy: Policy, kind: str
) -> MicroSteps:
    """Micro-steps of which the last one's backward sums each run's buffer while the one before it
    runs."""
    by_name = {run.name: run for run in runs}
    parallel, bits = policy.config.parallel, policy.main_gradient_dtype.bits
    axis = "shard" if policy.config.parallel.shards else "data"
    beside = not (policy.stack.engine.sums_late and axis == "shard")
    *earlier, (_, last) = last_apart(micro_steps)
    found: list[Segment] = []
    for segment in with_every_run(last, runs):
        run = by_name.get(segment.name)
        if run is not None and segment.phase is Phase.BACKWARD:
            moved = _trained_bytes(run, parallel, bits)
            costs = collectives(kind, moved, parallel, axis, overlaps=beside)
            reduced: list[Event] = [(RUN, Work(None, costs, True))] if costs else []
            segment = segment.copy(events=[*segment.events, *reduced], repeat=segment.repeat)
        found.append(segment)
    return [*earlier, (1, found)]


def _trained_bytes(run: Run, parallel: ParallelConfig, bits: int) -> tuple[Size, Size]:
    """(bytes of what all ranks train, bytes of spread experts) at so many bits an element."""
    dense: Size = 0
    spread: Size = 0
    for weight in run.trained:
        if is_spread(weight.path, parallel):
            spread = spread + ceil_div(weight.elements * bits, 8)
        else:
            dense = dense + ceil_div(weight.elements * bits, 8)
    return dense, spread


def distributed_optimizer_step(
    model: RankModel, policy: Policy, turns: MicroSteps | None = None
) -> Step:
    """One rank's step; `turns` are those of a pipeline's rank."""
    runs, parallel = model.runs, policy.config.parallel
    in_place = policy.config.offload.optimizer or chosen_optimizer(policy).master is not None
    owned = (parts_in_place if in_place else own_partitions)(runs, parallel)
    turns = turns or lower_micro_steps(runs, model.shared, policy)
    kind = "all-reduce" if policy.stack.engine.sums_late else "reduce-scatter"
    micro_steps = summed_in_buffers(turns, runs, policy, kind)
    load = [
        *load_segments(runs, policy),
        *segments(
            "gradient buffers", Phase.LOAD, runs, by_block(lambda run: _buffers(run, policy))
        ),
        *([] if in_place else partitions_loaded(owned)),
    ]
    update = lower_update(owned, policy, model.sizes)
    late = runs
    if policy.stack.engine.gathers_in_forward:
        micro_steps, late = _gathered_before_use(micro_steps, runs, parallel)
    updated = partial(_updated, parallel=parallel, in_place=in_place)
    now, later = (by_block(partial(updated, gathers=at_once)) for at_once in (True, False))
    reached = {id(run) for run in late}
    update.work = update.work + segments(
        "new parameters",
        Phase.STEP,
        runs,
        lambda run: now(run) if id(run) in reached else later(run),
    )
    saved = save_segments(owned, policy)  # every rank writes its partitions as they are
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def _buffers(run: Run, policy: Policy) -> list[Event]:
    dtype, role, source = policy.main_gradient_dtype, Role.GRADIENTS, policy.stack.source
    return [
        (ALLOC, Tensor(f"main gradient of {w.tensor.name}", w.axes, dtype, role, w.path, source))
        for w in run.trained
    ]


def _updated(run: Run, *, parallel: ParallelConfig, gathers: bool, in_place: bool) -> list[Event]:
    """A rank's updated part is cast to 16 bits, unless the update was `in_place`, and `gathers` says
    that it reaches all others at once."""
    if not run.trained:
        return []
    dense, spread = _parameter_bytes(run, parallel)
    costs: list[Cost] = [*_gather(run, parallel, overlaps=False)] if gathers else []
    if not in_place:
        costs = [Move(2 * (dense + spread) // parallel.shard_degree), *costs]
    return [(RUN, Work(None, tuple(costs), False))] if costs else []


def _parameter_bytes(run: Run, parallel: ParallelConfig) -> tuple[Size, Size]:
    return _trained_bytes(run, parallel, run.trained[0].tensor.dtype.bits)


def _gather(run: Run, parallel: ParallelConfig, *, overlaps: bool) -> list[Collective]:
    moved = _parameter_bytes(run, parallel)
    return collectives("all-gather", moved, parallel, "shard", overlaps=overlaps)


def _gathered_before_use(
    turns: MicroSteps, runs: list[Run], parallel: ParallelConfig
) -> tuple[MicroSteps, list[Run]]:
    """Turns in which the first forward of each run begins with the gathering of its parameters,
    beside the run before; and the runs without a forward.

    Source: Megatron-LM core/distributed/distributed_data_parallel.py overlap_param_gather.
    """
    left = {run.name: run for run in runs if run.trained}
    found: MicroSteps = []
    for times, turn in turns:
        first: list[Segment] = []
        for segment in turn:
            run = left.pop(segment.name, None) if segment.phase is Phase.FORWARD else None
            if run is not None:
                costs = _gather(run, parallel, overlaps=True)
                segment = segment.copy(
                    events=[(RUN, Work(None, costs, False)), *segment.events], repeat=segment.repeat
                )
            first.append(segment)
        changed = any(a is not b for a, b in zip(first, turn, strict=True))
        found += [(1, first), (times - 1, turn)] if changed and times > 1 else [(times, first)]
    return found, list(left.values())
