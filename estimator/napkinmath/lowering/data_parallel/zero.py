"""DeepSpeed ZeRO: stages 1 and 2 keep 16-bit parameters whole, stage 3 gathers them module by
module.

Sources: DeepSpeed 0.19 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer, stage3.py
DeepSpeedZeroOptimizer_Stage3, partition_parameters.py AllGatherCoalescedHandle,
partitioned_param_coordinator.py; ZeRO (arXiv 1910.02054), ZeRO-Offload (2101.06840), ZeRO-Infinity
(2104.07857), ZeRO++ (2306.10209), MiCS (2205.00119).
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.lowering.data_parallel.flat import master_of, partition, trained_weights
from napkinmath.lowering.data_parallel.holders import (
    collectives,
    is_spread,
    part_of,
    split_bytes,
    with_every_run,
)
from napkinmath.lowering.data_parallel.stored import shadow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.costs import Collective
    from napkinmath.ir.ledger import Event, Value
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run, Segment, Step
    from napkinmath.lowering.optimizer import Update
    from napkinmath.lowering.policy import Policy

SOURCE = "DeepSpeed runtime/zero"


def zero_step(spec: ModelSpec, policy: Policy, runs: list[Run], shared: dict[str, Value]) -> Step:
    """One rank's step under a ZeRO stage."""
    kind, offload = policy.config.parallel.data_parallel, policy.config.offload
    if offload.parameters and kind is not DataParallel.ZERO3:
        raise InputError(
            f"offloading parameters needs ZeRO stage 3, not {kind.value}; use --zero 3, or"
            " --offload optimizer"
        )
    if kind is DataParallel.ZERO3:
        from napkinmath.lowering.data_parallel.zero3 import partitioned_step

        return partitioned_step(spec, policy, runs, shared)
    return whole_parameters_step(spec, policy, runs, shared)


def whole_parameters_step(
    spec: ModelSpec,
    policy: Policy,
    runs: list[Run],
    shared: dict[str, Value],
    turns: list[tuple[int, list[Segment]]] | None = None,
) -> Step:
    """Stages 1 and 2; `turns` are those of a pipeline's rank, whose gradients are reduced after the
    last one."""
    from napkinmath.ir.step import Segment, Step, lower_micro_step
    from napkinmath.lowering.data_parallel.saving import save_partitions
    from napkinmath.lowering.lifecycle import load_segments

    parallel = policy.config.parallel
    partitioned = parallel.data_parallel is DataParallel.ZERO2
    on_host = policy.config.offload.optimizer
    masters = [master_of(run, parallel, host=on_host) for run in runs]
    owned = [
        shadow(run, [master] if master is not None else [], [])
        for run, master in zip(runs, masters, strict=True)
    ]
    averaged = [
        (
            partition(
                "averaged gradients",
                trained,
                parallel,
                trained[0].tensor.dtype,
                Role.GRADIENTS,
                run,
            )
            if (trained := trained_weights(run))
            else None
        )
        for run in runs
    ]
    steps = policy.config.gradient_accumulation_steps

    def micro_step(*, first: bool, last: bool) -> list[Segment]:
        lowered = lower_micro_step(runs, shared, policy, accumulate=not first and not partitioned)
        return _reducing(
            lowered,
            runs,
            averaged,
            policy,
            first=first,
            last=last,
            partitioned=partitioned,
            on_host=on_host,
        )

    if turns is not None:
        reduced = _reducing(
            with_every_run(turns[-1][1], runs),
            runs,
            averaged,
            policy,
            first=False,
            last=True,
            partitioned=False,
            on_host=on_host,
        )
        micro_steps = [*turns[:-1], (1, reduced)]
        steps = 1
    else:
        micro_steps = [(1, micro_step(first=True, last=steps == 1))]
    if steps > 2:
        micro_steps.append((steps - 2, micro_step(first=False, last=False)))
    if steps > 1:
        micro_steps.append((1, micro_step(first=False, last=True)))
    load = load_segments(runs, policy)
    load += [
        Segment(
            f"fp32 partition of {r.name}", Phase.LOAD, [(ALLOC, m.tensor)], r.count, r.stage.symbols
        )
        for r, m in zip(runs, masters, strict=True)
        if m is not None
    ]
    update = zero_update(owned, runs, averaged, policy, dict(spec.symbols))
    return Step(
        spec, policy, runs, load + update.load, micro_steps, update, save_partitions(owned, policy)
    )


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
    trained = [w for run in runs for w in trained_weights(run)]
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
    *,
    first: bool,
    last: bool,
    partitioned: bool,
    on_host: bool,
) -> list[Segment]:
    """Gradients leave for the buckets as they are made (stage 2), or all stay whole until the last
    micro-step is over (stage 1)."""
    from napkinmath.ir.step import Segment

    overlap = policy.config.parallel.zero.overlap_comm
    held = buckets(policy, runs, count=2 if overlap else 1)
    by_name = {run.name: index for index, run in enumerate(runs)}
    found: list[Segment] = []
    opened = False
    for segment in segments:
        index = by_name.get(segment.name, -1)
        mine = averaged[index] if index >= 0 and segment.phase is Phase.BACKWARD else None
        if mine is None:
            found.append(segment)
            continue
        run = runs[index]
        ends: list[Event] = []
        if partitioned or last:
            ends.append((RUN, Work(None, _reduction(run, policy, partitioned=partitioned), True)))
        if partitioned:
            ends += [
                *([] if on_host else [(ALLOC, mine)]),
                *((FREE, g) for g in run.block.gradients),
            ]
            if on_host:
                ends.append((RUN, Work(None, (HostCopy(mine.nbytes, to_host=True),), True)))
            elif not first:
                ends.append((FREE, mine))  # added to what earlier micro-steps left
        copies = (
            [(1, True), (segment.repeat - 1, False)] if not opened else [(segment.repeat, False)]
        )
        opened = True
        for repeat, opens in copies:
            if repeat:  # the first gradient of all finds no buckets yet
                found.append(
                    segment.copy(
                        events=[
                            *segment.events,
                            *(((ALLOC, t) for t in held) if opens else ()),
                            *ends,
                        ],
                        repeat=repeat,
                    )
                )
    if not partitioned and last:
        found += _whole_to_partitions(runs, averaged, on_host=on_host)
    if opened:
        found.append(Segment("reduce buckets released", Phase.BACKWARD, [(FREE, t) for t in held]))
    return found


def _whole_to_partitions(
    runs: list[Run], averaged: list[Tensor | None], *, on_host: bool
) -> list[Segment]:
    """Stage 1 after the last backward: of each gradient only the rank's part is kept."""
    from napkinmath.ir.step import Segment

    found: list[Segment] = []
    for run, mine in zip(runs, averaged, strict=True):
        if mine is None:
            continue
        events: list[Event] = [
            *([] if on_host else [(ALLOC, mine)]),
            *((FREE, g) for g in run.block.gradients),
        ]
        if on_host:
            events.append((RUN, Work(None, (HostCopy(mine.nbytes, to_host=True),), True)))
        found.append(
            Segment(
                f"partition of the gradients of {run.name}",
                Phase.BACKWARD,
                events,
                run.count,
                run.stage.symbols,
            )
        )
    return found


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
    owned: list[Run],
    runs: list[Run],
    averaged: list[Tensor | None],
    policy: Policy,
    sizes: dict[str, int],
) -> Update:
    """The fp32 gradient of the partition, clipping and update on it, and the all-gather of new
    16-bit parameters."""
    from napkinmath.lowering.data_parallel.host import partitions_updated_on_host
    from napkinmath.lowering.optimizer import lower_update, segments

    if policy.config.offload.optimizer:
        return partitions_updated_on_host(owned, runs, policy)
    update = lower_update(owned, policy, sizes)
    before: list[Segment] = []
    after: list[Segment] = []
    by_index = {
        id(mine): (run, grad)
        for mine, run, grad in zip(owned, runs, averaged, strict=True)
        if grad is not None
    }
    mine_with = [mine for mine in owned if id(mine) in by_index]
    flats = {
        id(mine): Tensor("flat gradients", g.axes, g.dtype, Role.GRADIENTS, g.module, SOURCE)
        for mine in mine_with
        for _, g in [by_index[id(mine)]]
    }
    wides = {
        id(mine): Tensor("fp32 gradients", g.axes, FP32, Role.GRADIENTS, g.module, SOURCE)
        for mine in mine_with
        for _, g in [by_index[id(mine)]]
    }
    before += segments("flat gradients", Phase.STEP, mine_with, lambda r: [(ALLOC, flats[id(r)])])
    before += segments("fp32 gradients", Phase.STEP, mine_with, lambda r: [(ALLOC, wides[id(r)])])
    before += segments(
        "flat gradients released", Phase.STEP, mine_with, lambda r: [(FREE, flats[id(r)])]
    )
    before += segments(
        "averaged gradients released", Phase.STEP, mine_with, lambda r: [(FREE, by_index[id(r)][1])]
    )
    after += segments(
        "fp32 gradients released", Phase.STEP, mine_with, lambda r: [(FREE, wides[id(r)])]
    )
    after += segments(
        "new parameters",
        Phase.STEP,
        mine_with,
        lambda r: [(RUN, Work(None, gathered_again(by_index[id(r)][0], policy), False))],
    )
    update.work = before + update.work + after
    return update


def gathered_again(run: Run, policy: Policy) -> tuple[Collective, ...]:
    """The all-gather that brings every rank the others' updated 16-bit parameters."""
    parallel = policy.config.parallel
    dense: Size = 0
    spread: Size = 0
    for weight in trained_weights(run):
        if is_spread(weight.path, parallel):
            spread = spread + weight.tensor.nbytes
        else:
            dense = dense + weight.tensor.nbytes
    return tuple(collectives("all-gather", (dense, spread), parallel, "shard", overlaps=False))
