"""ZeRO stage 3: 16-bit parameters in partitions, gathered for each layer's forward and again for
its backward.

What is used again within `max_reuse_distance` elements stays gathered: the last layers from their
forward to their backward. Sources: DeepSpeed 0.19 runtime/zero/partition_parameters.py
_all_gather_dtype (a flat output, then a copy of each parameter), partitioned_param_coordinator.py
fetch_sub_module, release_sub_module, __params_to_release; stage3.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8
from napkinmath.base.expr import Bindings, Size, ceil_div, minimum
from napkinmath.ir.costs import Collective, HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work, allocs
from napkinmath.ir.step import Run, Segment, Step, Update
from napkinmath.lowering.data_parallel.flat import (
    elements_of,
    master_dtype,
    own_partitions,
)
from napkinmath.lowering.data_parallel.host import partitions_updated_on_host
from napkinmath.lowering.data_parallel.saving import save_sharded
from napkinmath.lowering.data_parallel.zero import SOURCE, buckets
from napkinmath.lowering.data_parallel.zero3_partitions import Partitioned, loading
from napkinmath.lowering.lifecycle import save_segments
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.optimizer import lower_update

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel

PERSISTENCE_FACTOR, PREFETCH_SHARE = (
    10,
    0.9,
)  # of the hidden size and of its square: transformers integrations/deepspeed.py, where 'auto'


def partitioned_step(model: RankModel, policy: Policy) -> Step:
    """Stage 3."""
    runs, sizes, config = model.runs, model.sizes, policy.config
    pieces = pieces_of(runs, policy, sizes)
    keep_for_reuse(pieces, policy, sizes)
    prefetch = prefetched_elements(policy, sizes)
    lowered = lower_micro_step(runs, model.shared, policy, accumulate=False)
    gathered = gathering(lowered, pieces, policy, prefetch)
    micro_steps = [(config.gradient_accumulation_steps, gathered)]
    owned = own_partitions(runs, config.parallel, host=config.offload.optimizer)
    load = loading(pieces, owned, policy)
    held = allocs(*buckets(policy, runs, count=1))
    load.append(Segment("reduce buckets", Phase.LOAD, list(held)))
    update = stage3_update(owned, pieces, policy, sizes)
    whole = config.parallel.full_state_dict
    saved = save_sharded(runs, owned, policy) if whole else save_segments(owned, policy)
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def pieces_of(runs: list[Run], policy: Policy, sizes: dict[str, int]) -> list[Partitioned]:
    """What is stored of each run; parameters below a threshold are whole on every rank."""
    zero = policy.config.parallel.zero
    threshold = zero.param_persistence_threshold or PERSISTENCE_FACTOR * sizes.get("h", 4096)
    return [Partitioned(run, policy, sizes, threshold) for run in runs]


def prefetched_elements(policy: Policy, sizes: dict[str, int]) -> int:
    """Elements that may be on their way while a module runs."""
    hidden = sizes.get("h", 4096)
    wanted = policy.config.parallel.zero.prefetch_bucket_size
    return wanted or int(PREFETCH_SHARE * hidden * hidden)


def keep_for_reuse(pieces: list[Partitioned], policy: Policy, sizes: dict[str, int]) -> None:
    """How many of the last layers (and the head) are used again soon enough to stay gathered,
    within max_live_parameters."""
    zero = policy.config.parallel.zero
    used, room = 0, zero.max_live_parameters
    for piece in reversed(pieces):
        bind, weights = (
            Bindings({**sizes, **dict(piece.run.stage.symbols)}),
            piece.run.block.weights,
        )
        large = [w for w in weights if not w.buffer and not w.tied_to and w not in piece.small]
        each = bind(elements_of(large))
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


def gathering(
    segments: list[Segment], pieces: list[Partitioned], policy: Policy, prefetch: int
) -> list[Segment]:
    """Every run's segments with its parameters gathered before and released after, but for the
    copies that are used again soon."""
    by_name = {piece.run.name: piece for piece in pieces}
    done: dict[tuple[str, Phase], int] = {}
    forwards = copies_run(segments, Phase.FORWARD)
    backwards = {s.name for s in segments if s.phase is Phase.BACKWARD}
    found: list[Segment] = []
    for segment in segments:
        piece = by_name.get(segment.run)
        if piece is None or segment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            found.append(segment)
            continue
        key = segment.run, segment.phase
        held = _prefetched(piece, pieces, prefetch, backward=segment.phase is Phase.BACKWARD)
        found += [
            _beside(segment, "prefetch", [(ALLOC, t) for t in held]),
            *_gathered_copies(
                segment,
                piece,
                policy,
                done.get(key, 0),
                forwards[segment.run],
                views=piece.run.name in backwards and _keeps_views(piece, policy),
            ),
            _beside(segment, "end of the prefetch", [(FREE, t) for t in held]),
        ]
        done[key] = done.get(key, 0) + segment.repeat
    for piece in pieces:
        run = piece.run
        if piece.kept and run.name not in backwards:
            name, symbols = f"parameters of {run.name} released", run.stage.symbols
            found.append(Segment(name, Phase.BACKWARD, piece.release(), piece.kept, symbols))
    return found


def copies_run(segments: list[Segment], phase: Phase) -> dict[str, int]:
    """How many copies of each run go through a phase: of several forwards, all of them."""
    found: dict[str, int] = {}
    for segment in segments:
        found[segment.run] = found.get(segment.run, 0) + segment.repeat * (segment.phase is phase)
    return found


def _beside(segment: Segment, what: str, events: list[Event]) -> Segment:
    return Segment(f"{what} of {segment.name}", segment.phase, events, 1, segment.symbols)


def _prefetched(
    piece: Partitioned, pieces: list[Partitioned], prefetch: int, *, backward: bool
) -> list[Tensor]:
    """What of the next module's parameters is on its way while one runs."""
    is_last = piece is pieces[0] if backward else piece is pieces[-1]
    if is_last or (backward and piece.kept >= piece.run.count):
        return []
    name, size = "prefetched parameters", (minimum(piece.moved, prefetch * 2),)
    return [Tensor(name, size, UINT8, Role.COMMUNICATION, piece.run.block.name, SOURCE)]


def _gathered_copies(
    segment: Segment,
    piece: Partitioned,
    policy: Policy,
    done: int,
    forwards: int,
    *,
    views: bool,
) -> list[Segment]:
    """A run's segment, those of its copies apart that stay gathered, or of whose weights products
    keep `views`, from the last of `forwards` to the backward."""
    backward, whole = segment.phase is Phase.BACKWARD, forwards - piece.kept
    viewed = min(whole, forwards - piece.run.count) if views else whole
    bounds = (piece.kept,) if backward else (viewed, whole)
    found: list[Segment] = []
    for repeat, passed in _split(segment.repeat, done, bounds):
        events = [piece.hooks(backward=backward)]
        if not backward or passed:
            events += piece.gather(policy, backward=backward)
        events += segment.events
        if backward:
            events += [*_reduced(piece, policy), *piece.release()]
            events += piece.release_products() if passed and views else []
        elif passed < len(bounds):
            events += piece.release_but_products() if passed else piece.release()
        found.append(segment.copy(events=events, repeat=repeat))
    return found


def _keeps_views(piece: Partitioned, policy: Policy) -> bool:
    """Whether torch's own linears run, whose backward reads a view of the gathered weight; a
    checkpoint's forward keeps nothing."""
    recomputed = policy.recomputes and piece.run.stage.checkpointed
    return not policy.config.parallel.zero.memory_efficient_linear and not recomputed


def _split(repeat: int, done: int, bounds: tuple[int, ...]) -> list[tuple[int, int]]:
    """(copies, bounds passed) of a segment's copies, `done` of whose run came before."""
    found: list[tuple[int, int]] = []
    for passed, end in enumerate((*bounds, done + repeat)):
        copies = min(end, done + repeat) - done
        if copies > 0:
            found.append((copies, passed))
            done, repeat = done + copies, repeat - copies
    return found


def _reduced(piece: Partitioned, policy: Policy) -> list[Event]:
    """Gradients go through the bucket into their partition."""
    gradients = piece.run.block.gradients
    if not gradients:
        return []
    parallel, offload = policy.config.parallel, policy.config.offload
    moved: Size = 0
    for gradient in gradients:
        moved = moved + gradient.nbytes
    own, ranks = moved // parallel.shard_degree, parallel.shard_degree
    kind, sent = "reduce-scatter", moved
    if parallel.zero.quantized_gradients:
        kind, sent = "staged all-to-all", moved // 4
    overlaps = parallel.zero.overlap_comm is not False
    costs: list[Cost] = [Move(4 * moved)]
    costs.append(Collective(kind, sent, ranks=ranks, axis="shard", overlaps=overlaps))
    if (copies := parallel.replica_degree) > 1:
        costs.append(Collective("all-reduce", own, ranks=copies, axis="replica"))
    if offload.optimizer:
        costs.append(HostCopy(own, to_host=True, pinned=offload.pinned))
    return [(RUN, Work(None, costs, True)), *((FREE, g) for g in gradients)]


def stage3_update(
    owned: list[Run], pieces: list[Partitioned], policy: Policy, sizes: dict[str, int]
) -> Update:
    """Sub-groups of partitions one after the other: an fp32 gradient, the update, the 16-bit
    partition."""
    zero = policy.config.parallel.zero
    trained = [(p.run, p.gradients) for p in pieces if p.gradients is not None]
    total, partitions = 0, list[int]()
    for run, gradients in trained:
        bind = Bindings({**sizes, **dict(run.stage.symbols)})
        total += run.count * bind(gradients.axes[0])
        ranks = policy.config.parallel.shard_degree
        partitions += [-(-bind(w.elements) // ranks) for w in run.trained] * run.count
    groups = sub_groups(partitions, zero.sub_group_size)
    if policy.config.offload.optimizer:
        found = partitions_updated_on_host(owned, [p.run for p in pieces], policy, gradients=False)
        in_memory = "optimizer" not in policy.config.parallel.nvme
        kept = groups[: int((1 - zero.offload_ratio) * len(groups))] if in_memory else []
        return _partly_on_device(found, kept, policy) if kept else found
    update = lower_update(owned, policy, sizes)
    if not total:
        return update
    size = (min(max(groups), total),)
    source, summed = f"{SOURCE}/stage3.py _prepare_fp32_grad_for_sub_group", trained[0][1].dtype
    half = trained[0][0].trained[0].tensor.dtype
    flat = Tensor("flat gradients of a sub-group", size, summed, Role.GRADIENTS, "", source)
    master = master_dtype(policy.config.parallel)
    wide = Tensor(f"{master} gradients of a sub-group", size, master, Role.GRADIENTS, "", source)
    widened: list[Event] = [(ALLOC, wide)]  # of the masters' type, copied once, into a flat one
    if summed is not master:
        widened = [(ALLOC, flat), (ALLOC, wide), (FREE, flat)]
    update.work = [
        Segment("fp32 gradients", Phase.STEP, widened),
        *update.work,
        Segment("fp32 gradients released", Phase.STEP, [(FREE, wide)]),
    ]
    if policy.config.offload.parameters:  # masters on the device, 16-bit partitions on the host
        nbytes = ceil_div(total * half.bits, 8)
        copied = HostCopy(nbytes, to_host=True, pinned=policy.config.offload.pinned)
        new = Tensor("16-bit parameters of a sub-group", size, half, Role.WORKSPACE, "", source)
        events: list[Event] = [(ALLOC, new), (RUN, Work(None, [copied], False)), (FREE, new)]
        update.work.append(Segment("parameters to the host", Phase.STEP, events))
    return update


def sub_groups(partitions: list[int], size: int) -> list[int]:
    """Elements of each sub-group: parameters join one until it has `size`; 0 makes one of each
    parameter (stage3.py _create_fp16_sub_groups)."""
    found: list[int] = []
    held = 0
    for place, elements in enumerate(partitions):
        held += elements
        if held >= size or place == len(partitions) - 1:
            found.append(held)
            held = 0
    return found


def _partly_on_device(update: Update, groups: list[int], policy: Policy) -> Update:
    """The first sub-groups, in elements, with masters, gradients and states on the device, where
    torch's AdamW updates one after the other. The host's part is not made smaller.

    Source: stage3.py _create_fp32_partitions (subgroup_to_device), initialize_optimizer_states,
    backup_optimizer.
    """
    dtype, source = master_dtype(policy.config.parallel), f"{SOURCE}/stage3.py backup_optimizer"
    kinds = [("masters", Role.MASTER), ("gradients", Role.GRADIENTS)]
    kinds += [("exp_avg", Role.OPTIMIZER), ("exp_avg_sq", Role.OPTIMIZER)]
    kept = [
        Tensor(f"{name} of sub-groups on the device", (sum(groups),), dtype, role, "", source)
        for name, role in kinds
    ]
    roots = Tensor("roots of a sub-group", (max(groups),), dtype, Role.WORKSPACE, "", source)
    update.load = [*update.load, Segment("sub-groups on the device", Phase.LOAD, [*allocs(*kept)])]
    passes: list[Event] = [(ALLOC, roots), (FREE, roots)]
    update.work = [Segment("sub-groups on the device", Phase.STEP, passes), *update.work]
    return update
