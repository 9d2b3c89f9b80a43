"""Replicated parameters: DistributedDataParallel's gradient buckets, and nn.DataParallel's first
GPU.

Sources: torch 2.13 nn/parallel/distributed.py, csrc/distributed/c10d/reducer.cpp
(initialize_buckets: one flat tensor a bucket that lives as long as the reducer;
mark_variable_ready_dense, finalize_bucket_dense: copies in and out, or gradients that are views).
"""

from __future__ import annotations

from napkinmath.base.expr import Bindings, Size
from napkinmath.base.units import MIB
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import Collective, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment, Update
from napkinmath.lowering.data_parallel.holders import (
    collectives,
    data_ranks,
    is_spread,
    split_bytes,
    with_every_run,
)
from napkinmath.lowering.data_parallel.main_gradients import summed_in_buffers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy

MicroSteps = list[tuple[int, "list[Segment]"]]
SOURCE = "torch csrc/distributed/c10d/reducer.cpp"
FIRST_BUCKET = MIB
LARGEST_BROADCAST = (
    250 * MIB
)  # _sync_module_states: parameters go out from rank 0 in flat copies of at most this size


def replicate(
    runs: list[Run],
    policy: Policy,
    load: list[Segment],
    micro_steps: MicroSteps,
    update: Update,
    sizes: dict[str, int],
) -> tuple[list[Segment], MicroSteps]:
    """(loading, micro-steps) with what replicas add; `update` keeps its gradients only where they
    are no views of buckets."""
    if policy.config.parallel.data_parallel is DataParallel.DP:
        return load, [
            (times, _gathered_on_first(segments, runs, policy)) for times, segments in micro_steps
        ]
    load = [*load, *_broadcast(runs, policy, sizes), *_buckets(runs)]
    if policy.keeps_main_gradients:
        micro_steps = summed_in_buffers(micro_steps, runs, policy.config.parallel, "all-reduce")
    viewed = policy.config.parallel.gradient_as_bucket_view
    *earlier, (times, last) = micro_steps
    if times > 1:
        earlier.append((times - 1, last))
    reduced = _reduced(with_every_run(last, runs), runs, policy, sizes, releases=viewed)
    if viewed:
        update.zero = []
    return load, [*earlier, (1, reduced)]


def _trained(run: Run) -> list[Tensor]:
    return run.block.gradients


def _buckets(runs: list[Run]) -> list[Segment]:
    """One buffer as large as each gradient: buckets hold all of them, however they are cut."""
    found: list[Segment] = []
    for run in runs:
        events: list[Event] = [
            (
                ALLOC,
                Tensor(
                    f"bucket of {g.name}", g.axes, g.dtype, Role.COMMUNICATION, g.module, SOURCE
                ),
            )
            for g in _trained(run)
        ]
        if events:
            found.append(
                Segment(
                    f"gradient buckets of {run.name}",
                    Phase.LOAD,
                    events,
                    run.count,
                    run.stage.symbols,
                )
            )
    return found


def _broadcast(runs: list[Run], policy: Policy, sizes: dict[str, int]) -> list[Segment]:
    """The flat copy in which parameters of one broadcast travel, there while the engine is made."""
    from napkinmath.base.dtypes import UINT8

    total = 0
    for run in runs:
        bind = Bindings({**sizes, **dict(run.stage.symbols)})
        total += run.count * sum(bind(w.tensor.nbytes) for w in run.block.weights if not w.tied_to)
    flat = Tensor(
        "parameters on their way",
        (min(total, LARGEST_BROADCAST),),
        UINT8,
        Role.COMMUNICATION,
        "",
        "torch distributed/utils.py _sync_module_states",
    )
    work = Work(
        None,
        (
            Collective(
                "broadcast",
                total,
                ranks=data_ranks(policy.config.parallel, spread=False),
                axis="data",
                overlaps=False,
            ),
        ),
        False,
    )
    return [
        Segment(
            "broadcast of the parameters", Phase.LOAD, [(ALLOC, flat), (RUN, work), (FREE, flat)]
        )
    ]


def _reduced(
    segments: list[Segment],
    runs: list[Run],
    policy: Policy,
    sizes: dict[str, int],
    *,
    releases: bool,
) -> list[Segment]:
    """The last micro-step: buckets are reduced as their gradients are there; views of buckets take
    no memory of their own."""
    by_name = {run.name: run for run in runs}
    closing = closed_buckets(segments, by_name, policy, sizes)
    parallel = policy.config.parallel
    found: list[Segment] = []
    for position, segment in enumerate(segments):
        calls, moved = closing.get(position, (0, 0))
        run = by_name.get(segment.name)
        gradients = _trained(run) if run is not None and segment.phase is Phase.BACKWARD else []
        if not gradients:
            found.append(segment)
            continue
        total: Size = 0
        for gradient in gradients:
            total = total + gradient.nbytes
        copies: list[Event] = [
            (RUN, Work(None, (Move((2 if releases else 4) * total, len(gradients)),), True))
        ]
        freed: list[Event] = [(FREE, gradient) for gradient in gradients] if releases else []
        each, more = divmod(calls, segment.repeat)
        for repeat, number in ((more, each + 1), (segment.repeat - more, each)):
            if repeat:
                reduce = [
                    c
                    for _ in range(number)
                    for c in collectives("all-reduce", (moved // calls, 0), parallel, "data")
                ]
                reduce += collectives(
                    "all-reduce", (0, split_bytes(gradients, parallel)[1]), parallel, "data"
                )
                work: list[Event] = [(RUN, Work(None, reduce, True))] if reduce else []
                found.append(
                    segment.copy(events=[*segment.events, *copies, *work, *freed], repeat=repeat)
                )
    return found


def closed_buckets(
    segments: list[Segment], by_name: dict[str, Run], policy: Policy, sizes: dict[str, int]
) -> dict[int, tuple[int, int]]:
    """(buckets, their bytes) that are full within each segment; a bucket takes whole gradients as
    they come until it reaches its cap.

    The first bucket's cap is 1 MiB; spread experts are reduced among the ranks that hold them.
    Source: torch csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size,
    rebuild_buckets.
    """
    caps, filled = [FIRST_BUCKET, policy.config.parallel.bucket_mb * MIB], 0
    found: dict[int, tuple[int, int]] = {}
    last = -1
    for position, segment in enumerate(segments):
        run = by_name.get(segment.name)
        if run is None or segment.phase is not Phase.BACKWARD or not _trained(run):
            continue
        last = position
        bind = Bindings({**sizes, **dict(segment.symbols)})
        gradients = [
            bind(g.nbytes) for g in _trained(run) if not is_spread(g.module, policy.config.parallel)
        ]
        for nbytes in gradients * segment.repeat:
            filled += nbytes
            if filled >= caps[0]:
                calls, moved = found.get(position, (0, 0))
                found[position] = calls + 1, moved + filled
                caps, filled = caps[-1:], 0
    if filled:
        calls, moved = found.get(last, (0, 0))
        found[last] = calls + 1, moved + filled
    return found


def _gathered_on_first(segments: list[Segment], runs: list[Run], policy: Policy) -> list[Segment]:
    """nn.DataParallel's first GPU: parameters go out in every forward, all replicas' logits come
    in, and their gradients are added.

    Source: torch 2.13 nn/parallel/data_parallel.py, replicate.py, scatter_gather.py gather; the
    Trainer asks for loss and logits.
    """
    ranks = policy.config.parallel.data_parallel_size
    parameters: Size = 0
    for run in runs:
        for weight in run.block.weights:
            if not weight.tied_to and not run.stage.symbols:
                parameters = parameters + run.count * weight.tensor.nbytes
    out = Work(
        None,
        (Collective("broadcast", parameters, ranks=ranks, axis="data", overlaps=False),),
        False,
    )
    back = Work(
        None, (Collective("reduce", parameters, ranks=ranks, axis="data", overlaps=False),), True
    )
    logits = [
        Tensor(
            "logits of all replicas",
            (ranks * t.axes[0], *t.axes[1:]),
            t.dtype,
            Role.LOGITS,
            t.module,
            "torch nn/parallel/scatter_gather.py",
        )
        for t in _logits(runs[-1])
    ]
    gathered = Segment(
        "outputs of the replicas",
        Phase.FORWARD,
        [*((ALLOC, t) for t in logits), *((FREE, t) for t in reversed(logits))],
    )
    position = next((i for i, s in enumerate(segments) if s.phase is Phase.BACKWARD), len(segments))
    return [
        Segment("parameters to the replicas", Phase.FORWARD, [(RUN, out)]),
        *segments[:position],
        gathered,
        *segments[position:],
        Segment("gradients of the replicas", Phase.BACKWARD, [(RUN, back)]),
    ]


def _logits(run: Run) -> list[Tensor]:
    """What the head's product makes."""
    for op in run.block.ops:
        if (
            any(v.weight is not None and v.weight.kind in ("head", "embedding") for v in op.inputs)
            and op.outputs
        ):
            return [op.outputs[0].tensor]
    return []
