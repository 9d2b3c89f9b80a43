"""DeepSpeed ZeRO: stages 1 and 2 keep 16-bit parameters whole, stage 3 gathers them module by
module.

Sources: DeepSpeed 0.19 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer, stage3.py
DeepSpeedZeroOptimizer_Stage3, partition_parameters.py AllGatherCoalescedHandle,
partitioned_param_coordinator.py; ZeRO (arXiv 1910.02054), ZeRO-Offload (2101.06840), ZeRO-Infinity
(2104.07857), ZeRO++ (2306.10209), MiCS (2205.00119).
"""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment, Step, Update, segments
from napkinmath.lowering.data_parallel.flat import (
    SOURCE,
    FlatRow,
    master_dtype,
    partition,
    partitions_loaded,
    rows_of,
)
from napkinmath.lowering.data_parallel.holders import (
    collectives,
    part_of,
    split_bytes,
    with_every_run,
)
from napkinmath.lowering.data_parallel.host import partitions_updated_on_host
from napkinmath.lowering.data_parallel.zero_copies import (
    copies_gathered,
    copies_to_reduce,
    reduces_copies,
)
from napkinmath.lowering.lifecycle import load_segments, save_segments
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.optimizer import lower_update

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.costs import Collective
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel


def whole_parameters_step(
    model: RankModel, policy: Policy, turns: list[tuple[int, list[Segment]]] | None = None
) -> Step:
    """Stages 1 and 2; `turns` are those of a pipeline's rank, whose gradients are reduced after the
    last one."""
    runs, parallel = model.runs, policy.config.parallel
    rows = rows_of(runs, parallel, host=policy.config.offload.optimizer)
    averaged = [_averaged(run, parallel) for run in runs]
    if turns is None:
        micro_steps = _accumulated(model, averaged, policy)
    else:
        last = with_every_run(turns[-1][1], runs)
        reduced = _reducing(last, runs, averaged, policy, model.sizes, first=False, last=True)
        micro_steps = [*turns[:-1], (1, reduced)]
    owned = [row.part for row in rows]
    load = load_segments(runs, policy) + partitions_loaded(owned)
    update = zero_update(rows, runs, averaged, policy, model.sizes)
    saved = save_segments(owned, policy)  # every rank writes its partitions as they are
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def _averaged(run: Run, parallel: ParallelConfig) -> Tensor | None:
    """A rank's part of the averaged gradients of a run."""
    trained = run.trained
    if not trained:
        return None
    dtype = trained[0].tensor.dtype
    return partition("averaged gradients", trained, parallel, dtype, Role.GRADIENTS, run)


def _accumulated(
    model: RankModel, averaged: list[Tensor | None], policy: Policy
) -> list[tuple[int, list[Segment]]]:
    """(times, segments) of the micro-steps: the first finds no gradients, the last reduces them."""
    steps, runs = policy.config.gradient_accumulation_steps, model.runs
    partitioned = policy.config.parallel.data_parallel is DataParallel.ZERO2

    def micro_step(*, first: bool, last: bool) -> list[Segment]:
        adds = not first and not partitioned
        lowered = lower_micro_step(runs, model.shared, policy, accumulate=adds)
        return _reducing(lowered, runs, averaged, policy, model.sizes, first=first, last=last)

    found = [(1, micro_step(first=True, last=steps == 1))]
    if steps > 2:
        found.append((steps - 2, micro_step(first=False, last=False)))
    if steps > 1:
        found.append((1, micro_step(first=False, last=True)))
    return found


def bucket_elements(policy: Policy, runs: list[Run]) -> int | Size:
    """Elements of one reduce bucket: as set, or the square of the hidden size ('auto' in the
    Trainer's integration)."""
    wanted = policy.config.parallel.zero.reduce_bucket_size
    if wanted:
        return wanted
    width = next(
        (
            w.axes[0]
            for run in runs
            for w in run.block.weights
            if len(w.axes) == 1 and w.kind == "norm"
        ),
        4096,
    )
    return width * width


def buckets(policy: Policy, runs: list[Run], *, count: int) -> list[Tensor]:
    """The contiguous buffers in which gradients are gathered before they are reduced."""
    trained = [w for run in runs for w in run.trained]
    if not trained or not policy.config.parallel.zero.contiguous_gradients:
        return []
    size = bucket_elements(policy, runs)
    return [
        Tensor(
            "reduce bucket",
            (size,),
            trained[0].tensor.dtype,
            Role.COMMUNICATION,
            "",
            f"{SOURCE} ipg_buckets",
        )
        for _ in range(count)
    ]


def _reducing(
    segments: list[Segment],
    runs: list[Run],
    averaged: list[Tensor | None],
    policy: Policy,
    sizes: dict[str, int],
    *,
    first: bool,
    last: bool,
) -> list[Segment]:
    """Gradients leave for the buckets as they are made (stage 2), or all stay whole until the last
    micro-step is over (stage 1)."""
    parallel = policy.config.parallel
    partitioned = parallel.data_parallel is DataParallel.ZERO2
    count = 0 if reduces_copies(policy) else 2 if parallel.zero.overlap_comm else 1
    held = buckets(policy, runs, count=count)
    by_name = {run.name: index for index, run in enumerate(runs)}
    opening: list[Event] = [(ALLOC, t) for t in held]
    found: list[Segment] = []
    has_buckets = False  # the first gradient of all finds no buckets
    for segment in segments:
        index = by_name.get(segment.name, -1)
        mine = averaged[index] if index >= 0 and segment.phase is Phase.BACKWARD else None
        if mine is None:
            found.append(segment)
            continue
        ends = _leaving(runs[index], mine, policy, first=first, last=last)
        for repeat in [segment.repeat] if has_buckets else [1, segment.repeat - 1]:
            if repeat:
                begins = [] if has_buckets else opening
                events = [*segment.events, *begins, *ends]
                found.append(segment.copy(events=events, repeat=repeat))
                has_buckets = True
    if not partitioned and last:
        found += copies_to_reduce(runs, policy, sizes, bucket_elements(policy, runs))
        found += _whole_to_partitions(runs, averaged, policy)
    if has_buckets:
        found.append(Segment("reduce buckets released", Phase.BACKWARD, [(FREE, t) for t in held]))
    return found


def _leaving(run: Run, mine: Tensor, policy: Policy, *, first: bool, last: bool) -> list[Event]:
    """What follows the making of a run's gradients: their reduction, and in stage 2 their way to
    the rank's part."""
    partitioned = policy.config.parallel.data_parallel is DataParallel.ZERO2
    events: list[Event] = []
    if partitioned or last:
        events.append((RUN, Work(None, _reduction(run, policy, partitioned=partitioned), True)))
    if partitioned:
        events += _to_partition(run, mine, policy, first=first)
    return events


def _to_partition(run: Run, mine: Tensor, policy: Policy, *, first: bool = True) -> list[Event]:
    """Of each gradient only the rank's part is kept, or added to what earlier micro-steps left; on
    the host where the optimizer is there."""
    on_host = policy.config.offload.optimizer
    events: list[Event] = [] if on_host else [(ALLOC, mine)]
    events += [(FREE, g) for g in run.block.gradients]
    if on_host:
        events.append((RUN, Work(None, (HostCopy(mine.nbytes, to_host=True),), True)))
    elif not first:
        events.append((FREE, mine))
    return events


def _whole_to_partitions(
    runs: list[Run], averaged: list[Tensor | None], policy: Policy
) -> list[Segment]:
    """Stage 1 after the last backward: of each gradient only the rank's part is kept."""
    return [
        run.segment(
            f"partition of the gradients of {run.name}",
            Phase.BACKWARD,
            _to_partition(run, mine, policy),
        )
        for run, mine in zip(runs, averaged, strict=True)
        if mine is not None
    ]


def _reduction(run: Run, policy: Policy, *, partitioned: bool) -> tuple[Move | Collective, ...]:
    parallel = policy.config.parallel
    moved = split_bytes(run.block.gradients, parallel)
    overlaps = parallel.zero.overlap_comm is True
    return (
        Move(2 * (moved[0] + moved[1])),
        *collectives(
            "reduce-scatter" if partitioned else "all-reduce",
            moved,
            parallel,
            "shard",
            overlaps=overlaps,
        ),
        *collectives(
            "all-reduce", part_of(moved, parallel), parallel, "replica", overlaps=overlaps
        ),
    )


def zero_update(
    rows: list[FlatRow],
    runs: list[Run],
    averaged: list[Tensor | None],
    policy: Policy,
    sizes: dict[str, int],
) -> Update:
    """The fp32 gradient of the partition, clipping and update on it, and the all-gather of new
    16-bit parameters; states are made with the engine."""
    owned = [row.part for row in rows]
    if policy.config.offload.optimizer:
        return partitions_updated_on_host(owned, runs, policy)
    update = lower_update(owned, policy, sizes)
    own = {id(run): grad for run, grad in zip(runs, averaged, strict=True) if grad is not None}
    trained = [run for run in runs if id(run) in own]
    master = master_dtype(policy.config.parallel)
    flats, wides = (
        {id(row.part): row.beside(name, dtype or own[id(row.runs[0])].dtype) for row in rows}
        for name, dtype in (("flat gradients", None), (f"{master} gradients", master))
    )
    copied = [part for part in owned if flats[id(part)].dtype is not master]

    read = {**flats, **{id(part): wides[id(part)] for part in copied}}

    def each(
        label: str, event_of: Callable[[Run], Event], among: list[Run] = owned
    ) -> list[Segment]:
        return segments(label, Phase.STEP, among, lambda run: [event_of(run)])

    update.work = [
        *each("flat gradients", lambda part: (ALLOC, flats[id(part)])),
        *each("fp32 gradients", lambda part: (ALLOC, wides[id(part)]), copied),
        *each("flat gradients released", lambda part: (FREE, flats[id(part)]), copied),
        *each("averaged gradients released", lambda run: (FREE, own[id(run)]), trained),
        *update.work,
        *each("update's gradients released", lambda part: (FREE, read[id(part)])),
        *each("new parameters", lambda run: (RUN, gathered_again(run, policy)), trained),
        *copies_gathered(runs, policy, sizes),
    ]
    states_at_load(update, wides, owned)
    return update


def states_at_load(update: Update, gradients: dict[int, Tensor], owned: list[Run]) -> None:
    """An update of zero `gradients` as the engine is made, which makes the states.

    Source: DeepSpeed runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py
    initialize_optimizer_states.
    """

    def each(label: str, action: str) -> list[Segment]:
        found = [run for run in owned if id(run) in gradients]
        return segments(label, Phase.LOAD, found, lambda run: [(action, gradients[id(run)])])

    states = [Segment(s.name, Phase.LOAD, s.events, s.repeat, s.symbols) for s in update.states]
    update.load = [
        *update.load,
        *each("zero gradients", ALLOC),
        *states,
        *each("zero gradients released", FREE),
    ]
    update.states = []


def gathered_again(run: Run, policy: Policy) -> Work:
    """The all-gather that brings every rank the others' updated 16-bit parameters."""
    parallel = policy.config.parallel
    moved = split_bytes((w.tensor for w in run.trained), parallel)
    return Work(None, collectives("all-gather", moved, parallel, "shard", overlaps=False), False)
