"""ZeRO stage 3: 16-bit parameters in partitions, gathered for each layer's forward and again for
its backward.

What is used again within `max_reuse_distance` elements stays gathered: the last layers from their
forward to their backward. Sources: DeepSpeed 0.19 runtime/zero/partition_parameters.py
_all_gather_dtype (a flat output, then a copy of each parameter), partitioned_param_coordinator.py
fetch_sub_module, release_sub_module, __params_to_release; stage3.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, UINT8
from napkinmath.base.expr import Bindings, Size, minimum
from napkinmath.ir.costs import HOOK_DISPATCHES, Collective, Dispatch, HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run, Segment, Step, Update
from napkinmath.lowering.data_parallel.flat import (
    elements_of,
    master_of,
    partition,
    trained_weights,
)
from napkinmath.lowering.data_parallel.stored import shadow
from napkinmath.lowering.data_parallel.zero import SOURCE, buckets
from napkinmath.lowering.lifecycle import save_segments
from napkinmath.lowering.micro_step import lower_micro_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel

PERSISTENCE_FACTOR, PREFETCH_SHARE = (
    10,
    0.9,
)  # of the hidden size and of its square: transformers integrations/deepspeed.py, where 'auto'


class Partitioned:
    """What stage 3 makes of one run's weights: partitions that stay, and the buffers of a
    gather."""

    __slots__ = (
        "gathered",
        "gradients",
        "kept",
        "moved",
        "output",
        "parts",
        "run",
        "small",
        "stay",
    )

    def __init__(self, run: Run, policy: Policy, sizes: dict[str, int], threshold: int) -> None:
        parallel = policy.config.parallel
        ranks, on_host = parallel.shard_degree, policy.config.offload.parameters
        self.run = run
        bind = Bindings({**sizes, **dict(run.stage.symbols)})
        weights = [w for w in run.block.weights if not w.buffer and not w.tied_to]
        self.stay = [w for w in run.block.weights if w.buffer and not w.tied_to]
        self.small = [w for w in weights if not w.constants and bind(w.elements) <= threshold]
        large = [w for w in weights if w not in self.small]
        stored = [w for w in weights if not w.constants]
        dtypes = dict.fromkeys(w.tensor.dtype for w in stored)
        self.parts = [
            partition(
                f"{d} partition",
                [w for w in stored if w.tensor.dtype is d],
                parallel,
                d,
                Role.WEIGHTS,
                run,
                host=on_host,
            )
            for d in dtypes
        ]
        packed = [w for w in weights if w.constants]
        self.parts += [
            Tensor(
                w.tensor.name,
                tuple(
                    -(-a // ranks) if isinstance(a, int) else _shared(a, ranks)
                    for a in w.tensor.axes[:1]
                )
                + w.tensor.axes[1:],
                w.tensor.dtype,
                Role.WEIGHTS,
                w.path,
                SOURCE,
                host=on_host,
            )
            for w in packed
        ]
        self.gathered = [
            Tensor(
                f"gathered {w.tensor.name}",
                w.tensor.axes,
                w.tensor.dtype,
                w.tensor.role,
                w.path,
                SOURCE,
            )
            for w in large
        ]
        moved: Size = 0
        for tensor in self.gathered:
            moved = moved + tensor.nbytes
        self.moved = moved
        self.output = Tensor(
            "all-gather output", (moved,), UINT8, Role.COMMUNICATION, run.block.name, SOURCE
        )
        trained = trained_weights(run)
        self.gradients = (
            partition(
                "gradient partition",
                trained,
                parallel,
                trained[0].tensor.dtype,
                Role.GRADIENTS,
                run,
                host=policy.config.offload.optimizer,
            )
            if trained
            else None
        )
        self.kept = 0  # copies of the run, its last ones, that stay gathered until their backward

    def gather(self, policy: Policy, *, backward: bool) -> list[Event]:
        """Partitions are gathered into a flat output, from which each parameter is copied."""
        if not self.gathered:
            return []
        parallel = policy.config.parallel
        zero = parallel.zero
        ranks = (
            zero.hpz_partition_size
            if backward and zero.hpz_partition_size > 1
            else parallel.shard_degree
        )
        moved = self.moved // 2 if zero.quantized_weights else self.moved
        costs: list[Collective | HostCopy | Move] = [
            Collective("all-gather", moved, ranks=ranks, axis="shard"),
            Move(2 * self.moved),
        ]
        if policy.config.offload.parameters:
            costs.insert(
                0,
                HostCopy(
                    self.moved // parallel.shard_degree,
                    to_host=False,
                    pinned=policy.config.offload.pinned,
                ),
            )
        return [
            (ALLOC, self.output),
            *((ALLOC, t) for t in self.gathered),
            (RUN, Work(None, costs, backward)),
            (FREE, self.output),
        ]

    def hooks(self, *, backward: bool) -> Event:
        """The host's bookkeeping of every parameter, in hooks of its module."""
        count = sum(not w.buffer and not w.tied_to for w in self.run.block.weights)
        return RUN, Work(None, (Dispatch(HOOK_DISPATCHES[backward] * count),), backward)

    def release(self) -> list[Event]:
        """Gathered parameters go."""
        return [(FREE, t) for t in self.gathered]


def _shared(axis: Size, ranks: int) -> Size:
    from napkinmath.base.expr import ceil_div

    return ceil_div(axis, ranks)


def partitioned_step(model: RankModel, policy: Policy) -> Step:
    """Stage 3."""
    runs, sizes, config = model.runs, model.sizes, policy.config
    zero, hidden = config.parallel.zero, sizes.get("h", 4096)
    threshold = zero.param_persistence_threshold or PERSISTENCE_FACTOR * hidden
    pieces = [Partitioned(run, policy, sizes, threshold) for run in runs]
    keep_for_reuse(pieces, policy, sizes)
    prefetch = zero.prefetch_bucket_size or int(PREFETCH_SHARE * hidden * hidden)
    lowered = lower_micro_step(runs, model.shared, policy, accumulate=False)
    gathered = gathering(lowered, pieces, policy, prefetch)
    micro_steps = [(config.gradient_accumulation_steps, gathered)]
    masters = [master_of(run, config.parallel, host=config.offload.optimizer) for run in runs]
    owned = [
        shadow(run, [m] if m is not None else [], []) for run, m in zip(runs, masters, strict=True)
    ]
    load = [
        s
        for piece, master in zip(pieces, masters, strict=True)
        for s in loading(piece, master, policy)
    ]
    held = buckets(policy, runs, count=1)
    load.append(Segment("reduce buckets", Phase.LOAD, [(ALLOC, t) for t in held]))
    update = stage3_update(owned, pieces, policy, sizes)
    saved = save_segments(owned, policy)  # every rank writes its partitions as they are
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def keep_for_reuse(pieces: list[Partitioned], policy: Policy, sizes: dict[str, int]) -> None:
    """How many of the last layers (and the head) are used again soon enough to stay gathered,
    within max_live_parameters."""
    zero = policy.config.parallel.zero
    used, room = 0, zero.max_live_parameters
    for piece in reversed(pieces):
        bind = Bindings({**sizes, **dict(piece.run.stage.symbols)})
        each = bind(
            elements_of(
                [
                    w
                    for w in piece.run.block.weights
                    if not w.buffer and not w.tied_to and w not in piece.small
                ]
            )
        )
        while (
            piece.kept < piece.run.count
            and each
            and 2 * used + each <= zero.max_reuse_distance
            and used + each <= room
        ):
            piece.kept += 1
            used += each
        if piece.kept < piece.run.count:
            return


def loading(piece: Partitioned, master: Weight | None, policy: Policy) -> list[Segment]:
    """deepspeed.zero.Init: each parameter is whole on the device until its partition is made; then
    fp32 partitions and gradients' ones."""
    run = piece.run
    wholes = [
        Tensor(f"whole {t.name.removeprefix('gathered ')}", t.axes, t.dtype, Role.WEIGHTS, t.module)
        for t in piece.gathered
    ]
    events: list[Event] = [(ALLOC, t) for t in piece.parts]
    events += [e for t in wholes for e in ((ALLOC, t), (FREE, t))]
    events += [(ALLOC, t) for w in run.block.weights if not w.tied_to for t in w.constants]
    events += [(ALLOC, w.tensor) for w in piece.stay]
    events += [
        (
            ALLOC,
            Tensor(
                f"{w.tensor.name}, always whole",
                w.axes,
                w.tensor.dtype,
                Role.WEIGHTS,
                w.path,
                SOURCE,
            ),
        )
        for w in piece.small
    ]
    events += [
        (ALLOC, t)
        for t in ([master.tensor] if master is not None else [])
        + ([piece.gradients] if piece.gradients is not None else [])
    ]
    if policy.config.parallel.zero.hpz_partition_size > 1 and piece.gathered:
        second = Tensor(
            "secondary partition",
            (piece.moved // policy.config.parallel.zero.hpz_partition_size,),
            UINT8,
            Role.WEIGHTS,
            run.block.name,
            f"{SOURCE} zero_hpz_partition_size",
        )
        events.append((ALLOC, second))
    return [Segment(f"partitions of {run.name}", Phase.LOAD, events, run.count, run.stage.symbols)]


def gathering(
    segments: list[Segment], pieces: list[Partitioned], policy: Policy, prefetch: int
) -> list[Segment]:
    """Every run's segments with its parameters gathered before and released after, but for the
    copies that are used again soon."""
    by_name = {piece.run.name: piece for piece in pieces}
    left: dict[tuple[str, Phase], int] = {}
    found: list[Segment] = []
    for segment in segments:
        piece = by_name.get(segment.name)
        if piece is None or segment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            found.append(segment)
            continue
        backward = segment.phase is Phase.BACKWARD
        done = left.get((segment.name, segment.phase), 0)
        left[segment.name, segment.phase] = done + segment.repeat
        ahead = Tensor(
            "prefetched parameters",
            (minimum(piece.moved, prefetch * 2),),
            UINT8,
            Role.COMMUNICATION,
            piece.run.block.name,
            SOURCE,
        )
        gathers_next = (
            piece is not pieces[-1]
            if not backward
            else piece is not pieces[0] and piece.kept < piece.run.count
        )
        held = [ahead] if gathers_next else []
        found.append(
            Segment(
                f"prefetch of {segment.name}",
                segment.phase,
                [(ALLOC, t) for t in held],
                1,
                segment.symbols,
            )
        )
        for repeat, kept in _split(segment.repeat, done, piece, backward=backward):
            events = [
                piece.hooks(backward=backward),
                *([] if backward and kept else piece.gather(policy, backward=backward)),
                *segment.events,
            ]
            if backward:
                events += _reduced(piece, policy)
            if backward or not kept:
                events += piece.release()
            found.append(segment.copy(events=events, repeat=repeat))
        found.append(
            Segment(
                f"end of the prefetch of {segment.name}",
                segment.phase,
                [(FREE, t) for t in held],
                1,
                segment.symbols,
            )
        )
    idle = [
        piece
        for piece in pieces
        if piece.kept
        and not any(s.phase is Phase.BACKWARD and s.name == piece.run.name for s in segments)
    ]
    found += [
        Segment(
            f"parameters of {p.run.name} released",
            Phase.BACKWARD,
            p.release(),
            p.kept,
            p.run.stage.symbols,
        )
        for p in idle
    ]
    return found


def _split(repeat: int, done: int, piece: Partitioned, *, backward: bool) -> list[tuple[int, bool]]:
    """(copies, kept gathered) of a segment: the last ones in the forward are the first ones in the
    backward."""
    plain = piece.run.count - piece.kept
    first = max(0, min(repeat, (piece.kept if backward else plain) - done))
    return [(n, flag) for n, flag in ((first, backward), (repeat - first, not backward)) if n]


def _reduced(piece: Partitioned, policy: Policy) -> list[Event]:
    """Gradients go through the bucket into their partition."""
    gradients = piece.run.block.gradients
    if not gradients:
        return []
    parallel = policy.config.parallel
    moved: Size = 0
    for gradient in gradients:
        moved = moved + gradient.nbytes
    sent = moved // 4 if parallel.zero.quantized_gradients else moved
    kind = "all-to-all" if parallel.zero.quantized_gradients else "reduce-scatter"
    costs: list[Collective | HostCopy | Move] = [
        Move(4 * moved),
        Collective(
            kind,
            sent,
            ranks=parallel.shard_degree,
            axis="shard",
            overlaps=parallel.zero.overlap_comm is not False,
        ),
    ]
    if parallel.replica_degree > 1:
        costs.append(
            Collective(
                "all-reduce",
                moved // parallel.shard_degree,
                ranks=parallel.replica_degree,
                axis="replica",
            )
        )
    if policy.config.offload.optimizer:
        costs.append(
            HostCopy(
                moved // parallel.shard_degree, to_host=True, pinned=policy.config.offload.pinned
            )
        )
    return [(RUN, Work(None, costs, True)), *((FREE, g) for g in gradients)]


def stage3_update(
    owned: list[Run], pieces: list[Partitioned], policy: Policy, sizes: dict[str, int]
) -> Update:
    """Sub-groups of partitions one after the other: an fp32 gradient, the update, the 16-bit
    partition."""
    from napkinmath.lowering.data_parallel.host import partitions_updated_on_host
    from napkinmath.lowering.optimizer import lower_update

    if policy.config.offload.optimizer:
        return partitions_updated_on_host(owned, [p.run for p in pieces], policy, gradients=False)
    update = lower_update(owned, policy, sizes)
    total = 0
    for piece in pieces:
        if piece.gradients is not None:
            total += piece.run.count * Bindings({**sizes, **dict(piece.run.stage.symbols)})(
                piece.gradients.axes[0]
            )
    group = min(policy.config.parallel.zero.sub_group_size or total, total)
    source = f"{SOURCE}/stage3.py _prepare_fp32_grad_for_sub_group"
    half = next((piece.gradients.dtype for piece in pieces if piece.gradients is not None), FP32)
    flat = Tensor("flat gradients of a sub-group", (group,), half, Role.GRADIENTS, "", source)
    wide = Tensor("fp32 gradients of a sub-group", (group,), FP32, Role.GRADIENTS, "", source)
    if total:
        update.work = [
            Segment("fp32 gradients", Phase.STEP, [(ALLOC, flat), (ALLOC, wide), (FREE, flat)]),
            *update.work,
            Segment("fp32 gradients released", Phase.STEP, [(FREE, wide)]),
        ]
    return update
