"""Megatron-LM's engines: gradients are added to fp32 buffers that live through the run, and those
are what ranks sum.

DistributedDataParallel all-reduces the buffers; the distributed optimizer (`--zero 1` of that
stack) reduce-scatters them, updates a rank's part of the fp32 masters and gathers the new 16-bit
parameters: 6 + 12/d bytes a parameter. Sources: Megatron-LM
core/distributed/param_and_grad_buffer.py _ParamAndGradBucketGroup.start_grad_sync,
core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment, Step, segments
from napkinmath.lowering.data_parallel.flat import own_partitions, partitions_loaded
from napkinmath.lowering.data_parallel.holders import (
    collectives,
    is_spread,
    last_apart,
    with_every_run,
)
from napkinmath.lowering.lifecycle import load_segments, save_segments
from napkinmath.lowering.micro_step import lower_micro_steps
from napkinmath.lowering.optimizer import lower_update

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel

MicroSteps = list[tuple[int, "list[Segment]"]]


def summed_in_buffers(
    micro_steps: MicroSteps, runs: list[Run], parallel: ParallelConfig, kind: str
) -> MicroSteps:
    """Micro-steps of which the last one's backward sums each run's buffer while the one before it
    runs."""
    by_name = {run.name: run for run in runs}
    axis = "shard" if kind == "reduce-scatter" else "data"
    *earlier, (_, last) = last_apart(micro_steps)
    found: list[Segment] = []
    for segment in with_every_run(last, runs):
        run = by_name.get(segment.name)
        if run is not None and segment.phase is Phase.BACKWARD:
            costs = collectives(kind, _fp32_bytes(run, parallel), parallel, axis)
            reduced: list[Event] = [(RUN, Work(None, costs, True))] if costs else []
            segment = segment.copy(events=[*segment.events, *reduced], repeat=segment.repeat)
        found.append(segment)
    return [*earlier, (1, found)]


def _fp32_bytes(run: Run, parallel: ParallelConfig) -> tuple[Size, Size]:
    dense: Size = 0
    spread: Size = 0
    for weight in run.trained:
        if is_spread(weight.path, parallel):
            spread = spread + 4 * weight.elements
        else:
            dense = dense + 4 * weight.elements
    return dense, spread


def distributed_optimizer_step(
    model: RankModel, policy: Policy, turns: MicroSteps | None = None
) -> Step:
    """One rank's step; `turns` are those of a pipeline's rank."""
    runs, parallel = model.runs, policy.config.parallel
    owned = own_partitions(runs, parallel)
    turns = turns or lower_micro_steps(runs, model.shared, policy)
    micro_steps = summed_in_buffers(turns, runs, parallel, "reduce-scatter")
    source = policy.stack.source
    load = [
        *load_segments(runs, policy),
        *segments("gradient buffers", Phase.LOAD, runs, lambda run: _buffers(run, source)),
        *partitions_loaded(owned),
    ]
    update = lower_update(owned, policy, model.sizes)
    update.work = update.work + segments(
        "new parameters", Phase.STEP, runs, lambda run: _gathered(run, parallel)
    )
    saved = save_segments(owned, policy)  # every rank writes its partitions as they are
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def _buffers(run: Run, source: str) -> list[Event]:
    return [
        (
            ALLOC,
            Tensor(
                f"main gradient of {w.tensor.name}", w.axes, FP32, Role.GRADIENTS, w.path, source
            ),
        )
        for w in run.trained
    ]


def _gathered(run: Run, parallel: ParallelConfig) -> list[Event]:
    """Every rank's updated part, cast to 16 bits, reaches all others."""
    dense, spread = _fp32_bytes(run, parallel)
    if not run.trained:
        return []
    costs = collectives("all-gather", (dense // 2, spread // 2), parallel, "shard", overlaps=False)
    return [(RUN, Work(None, (Move((dense + spread) // parallel.shard_degree), *costs), False))]
