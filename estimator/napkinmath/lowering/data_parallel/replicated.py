"""Replicated parameters: DistributedDataParallel's gradient buckets, and nn.DataParallel's first
GPU.

Sources: torch 2.13 nn/parallel/distributed.py, csrc/distributed/c10d/reducer.cpp
(initialize_buckets: one flat tensor a bucket that lives as long as the reducer;
mark_variable_ready_dense, finalize_bucket_dense: copies in and out, or gradients that are views).
"""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8
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
    last_apart,
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
    parallel = policy.config.parallel
    if parallel.data_parallel is DataParallel.DP:
        return load, [(n, _gathered_on_first(step, runs, policy)) for n, step in micro_steps]
    load = [*load, *_broadcast(runs, policy, sizes), *_buckets(runs)]
    if policy.keeps_main_gradients:
        micro_steps = summed_in_buffers(micro_steps, runs, policy, "all-reduce")
    viewed = parallel.gradient_as_bucket_view
    *earlier, (_, last) = last_apart(micro_steps)
    reduced = _reduced(with_every_run(last, runs), runs, policy, sizes, releases=viewed)
    if viewed:
        update.zero = []
    return load, [*earlier, (1, reduced)]


def _trained(run: Run) -> list[Tensor]:
    return run.block.gradients


def _buckets(runs: list[Run]) -> list[Segment]:
    """One buffer as large as each gradient: buckets hold all of them, however they are cut."""
    found: list[Segment] = []
    role = Role.COMMUNICATION
    for run in runs:
        events: list[Event] = [
            (ALLOC, Tensor(f"bucket of {g.name}", g.axes, g.dtype, role, g.module, SOURCE))
            for g in _trained(run)
        ]
        if events:
            found.append(run.segment(f"gradient buckets of {run.name}", Phase.LOAD, events))
    return found


def _broadcast(runs: list[Run], policy: Policy, sizes: dict[str, int]) -> list[Segment]:
    """The flat copy in which parameters of one broadcast travel, there while the engine is made."""
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
    ranks = data_ranks(policy.config.parallel, spread=False)
    sent = Collective("broadcast", total, ranks=ranks, axis="data", overlaps=False)
    events: list[Event] = [(ALLOC, flat), (RUN, Work(None, (sent,), False)), (FREE, flat)]
    return [Segment("broadcast of the parameters", Phase.LOAD, events)]


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
    found: list[Segment] = []
    for position, segment in enumerate(segments):
        run = by_name.get(segment.name)
        gradients = _trained(run) if run is not None and segment.phase is Phase.BACKWARD else []
        if not gradients:
            found.append(segment)
            continue
        calls, moved = closing.get(position, (0, 0))
        each, more = divmod(calls, segment.repeat)
        for repeat, number in ((more, each + 1), (segment.repeat - more, each)):
            if repeat:
                sent = [moved // calls] * number if number else []
                events = _into_buckets(gradients, sent, policy, releases=releases)
                found.append(segment.copy(events=[*segment.events, *events], repeat=repeat))
    return found


def _into_buckets(
    gradients: list[Tensor], sent: list[int], policy: Policy, *, releases: bool
) -> list[Event]:
    """Gradients copied in, buckets of so many bytes reduced that they fill, and copied out."""
    parallel = policy.config.parallel
    total: Size = 0
    for gradient in gradients:
        total = total + gradient.nbytes
    copies = Move((2 if releases else 4) * total, len(gradients))
    spread = split_bytes(gradients, parallel)[1]
    reduced = [(nbytes, 0) for nbytes in sent] + [(0, spread)]
    costs = [c for moved in reduced for c in collectives("all-reduce", moved, parallel, "data")]
    events: list[Event] = [(RUN, Work(None, (copies,), True))]
    if costs:
        events.append((RUN, Work(None, costs, True)))
    return events + ([(FREE, gradient) for gradient in gradients] if releases else [])


def closed_buckets(
    segments: list[Segment], by_name: dict[str, Run], policy: Policy, sizes: dict[str, int]
) -> dict[int, tuple[int, int]]:
    """(buckets, their bytes) that are full within each segment; a bucket takes whole gradients as
    they come until it reaches its cap.

    The first bucket's cap is 1 MiB; spread experts are reduced among the ranks that hold them.
    Source: torch csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size,
    rebuild_buckets.
    """
    parallel = policy.config.parallel
    caps, filled, last = [FIRST_BUCKET, parallel.bucket_mb * MIB], 0, -1
    found: dict[int, tuple[int, int]] = {}

    def close(position: int) -> None:
        calls, moved = found.get(position, (0, 0))
        found[position] = calls + 1, moved + filled

    for position, segment in enumerate(segments):
        run = by_name.get(segment.name)
        if run is None or segment.phase is not Phase.BACKWARD or not _trained(run):
            continue
        last, bind = position, Bindings({**sizes, **dict(segment.symbols)})
        own = [bind(g.nbytes) for g in _trained(run) if not is_spread(g.module, parallel)]
        for nbytes in own * segment.repeat:
            filled += nbytes
            if filled >= caps[0]:
                close(position)
                caps, filled = caps[-1:], 0
    if filled:
        close(last)
    return found


def _gathered_on_first(segments: list[Segment], runs: list[Run], policy: Policy) -> list[Segment]:
    """nn.DataParallel's first GPU: parameters go out in every forward, all replicas' logits come
    in, and their gradients are added.

    Source: torch 2.13 nn/parallel/data_parallel.py, replicate.py, scatter_gather.py gather; the
    Trainer asks for loss and logits.
    """
    ranks = policy.config.parallel.data_parallel_size
    moved: Size = 0
    for run in runs:
        for weight in run.block.weights:
            if not weight.tied_to and not run.stage.symbols:
                moved = moved + run.count * weight.tensor.nbytes
    out, back = (
        (RUN, Work(None, (_exchanged(kind, moved, ranks),), kind == "reduce"))
        for kind in ("broadcast", "reduce")
    )
    logits = _logits_of_all(runs[-1], ranks)
    held: list[Event] = [(ALLOC, t) for t in logits]
    held += [(FREE, t) for t in reversed(logits)]
    position = next((i for i, s in enumerate(segments) if s.phase is Phase.BACKWARD), len(segments))
    return [
        Segment("parameters to the replicas", Phase.FORWARD, [out]),
        *segments[:position],
        Segment("outputs of the replicas", Phase.FORWARD, held),
        *segments[position:],
        Segment("gradients of the replicas", Phase.BACKWARD, [back]),
    ]


def _exchanged(kind: str, moved: Size, ranks: int) -> Collective:
    return Collective(kind, moved, ranks=ranks, axis="data", overlaps=False)


def _logits_of_all(head: Run, ranks: int) -> list[Tensor]:
    """The logits of all replicas on the first GPU."""
    name, source = "logits of all replicas", "torch nn/parallel/scatter_gather.py"
    return [
        Tensor(name, (ranks * t.axes[0], *t.axes[1:]), t.dtype, Role.LOGITS, t.module, source)
        for t in _logits(head)
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
