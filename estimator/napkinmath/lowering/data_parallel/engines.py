"""sharded_step: the step of one rank under FSDP or ZeRO, from the recorded runs of the whole
model."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.expr import ceil_div, product
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Role, Tensor, Weight
from napkinmath.ir.step import Run, Segment, Step, Update
from napkinmath.lowering.data_parallel.fp32_sums import fp32_summed_step, sums_in_fp32
from napkinmath.lowering.data_parallel.fsdp2 import FullyShard
from napkinmath.lowering.data_parallel.fsdp2_stages import ShardedStages
from napkinmath.lowering.data_parallel.holders import last_apart
from napkinmath.lowering.data_parallel.host import update_on_host
from napkinmath.lowering.data_parallel.main_gradients import (
    distributed_optimizer_step,
)
from napkinmath.lowering.data_parallel.saving import save_sharded
from napkinmath.lowering.data_parallel.stored import (
    is_sharded,
    on_host,
    packs_on_device,
    ranks_of,
    shadow,
    stored_dtype,
)
from napkinmath.lowering.data_parallel.zero import whole_parameters_step
from napkinmath.lowering.data_parallel.zero3 import partitioned_step
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.optimizer import lower_update
from napkinmath.lowering.parallel.pipeline import pipelined, waiting_buffers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.data_parallel.pieces import Piece
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel

    class Lowered(Protocol):
        """The segments of one kind of micro-step."""

        def __call__(self, *, accumulate: bool, reduces: bool, first: bool) -> list[Segment]: ...


def sharded_step(model: RankModel, policy: Policy) -> Step:
    """The step under the configured engine, of a pipeline's rank if there are `chunks`; raises
    InputError for what that engine does not do."""
    kind = policy.config.parallel.data_parallel
    if model.chunks:
        return _staged_engine_step(model, policy)
    if kind is DataParallel.ZERO1 and policy.keeps_main_gradients:
        return distributed_optimizer_step(model, policy)
    if sums_in_fp32(policy):
        return fp32_summed_step(model, policy)
    if policy.config.optimizer_in_backward:
        raise InputError(
            f"optimizer_in_backward is not priced with {kind.value}; leave it out, or use ddp"
        )
    offload = policy.config.offload
    if kind is DataParallel.ZERO3:
        return partitioned_step(model, policy)
    if kind.is_zero:
        if offload.parameters:
            raise InputError(
                f"offloading parameters needs ZeRO stage 3, not {kind.value}; use --zero 3, or"
                " --offload optimizer"
            )
        return whole_parameters_step(model, policy)
    if offload.optimizer and not offload.parameters:
        raise InputError(
            f"{kind.value} offloads parameters, gradients and optimizer together; use --offload"
            " optimizer,parameters"
        )
    return fully_sharded_step(model, policy)


def _staged_engine_step(model: RankModel, policy: Policy) -> Step:
    """The step of an engine within a pipeline."""
    kind = policy.config.parallel.data_parallel
    if kind is DataParallel.FSDP2:
        return staged_step(model, policy)
    if kind is not DataParallel.ZERO1:
        raise InputError(
            f"{kind.value} within a pipeline: no engine runs it (DeepSpeed's take ZeRO 1 at most);"
            " use fsdp2, zero1 or ddp with it"
        )
    if policy.keeps_main_gradients:
        return distributed_optimizer_step(model, policy, pipelined_steps(model, policy))
    if sums_in_fp32(policy):
        return fp32_summed_step(model, policy, pipelined_steps(model, policy))
    return whole_parameters_step(model, policy, pipelined_steps(model, policy))


def pipelined_steps(model: RankModel, policy: Policy) -> list[tuple[int, list[Segment]]]:
    """A pipeline rank's turns in its schedule's order, the last one by itself."""
    return last_apart(pipelined(model, policy))


def fully_sharded_step(model: RankModel, policy: Policy) -> Step:
    """FSDP's, of either generation: they differ in what a unit's pieces are."""
    runs = model.runs
    walker = FullyShard(runs, policy)
    ran = policy.beside is not None and policy.beside.runs_first

    def lowered(*, accumulate: bool, reduces: bool, first: bool) -> list[Segment]:
        adds = accumulate and not walker.sums
        segments = lower_micro_step(runs, model.shared, policy, accumulate=adds)
        held = accumulate and walker.sums
        walker.follows = ran and first and not accumulate
        return walker.micro_step(segments, reduces=reduces, first=first, held=held)

    micro_steps = accumulated(policy, lowered)
    return _step_of_pieces(model, policy, [walker], micro_steps, [])


def staged_step(model: RankModel, policy: Policy) -> Step:
    """FSDP2 within a pipeline: each chunk of a rank's model is gathered once and its gradients
    reduced once."""
    config = policy.config
    if config.parallel.reshards:
        raise InputError(
            "reshard_after_forward within a pipeline would gather every micro-batch's parameters"
            " anew; leave it out"
        )
    if config.offload.parameters or config.offload.optimizer or config.optimizer_in_backward:
        raise InputError(
            "fsdp2 within a pipeline is not priced with offloading or optimizer_in_backward; leave"
            " them out"
        )
    stages = ShardedStages(model, policy)
    micro_steps, waiting = stages.micro_steps(), waiting_buffers(model, policy)
    return _step_of_pieces(model, policy, stages.walkers, micro_steps, waiting)


def _step_of_pieces(
    model: RankModel,
    policy: Policy,
    walkers: Sequence[FullyShard],
    micro_steps: list[tuple[int, list[Segment]]],
    waiting: list[Segment],
) -> Step:
    """Loading, update and saving of what a rank stores, around its micro-steps."""
    runs = model.runs
    pieces = {piece.name: piece for w in walkers for unit in w.units for piece in unit.pieces}
    owned = [owned_by_rank(run, pieces.get(run.name), policy) for run in runs]
    load = load_whole_units(runs, owned, pieces, policy) + waiting
    update = update_of(owned, policy, model.sizes)
    saved = save_sharded(runs, owned, policy)
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, saved)


def owned_by_rank(run: Run, piece: Piece | None, policy: Policy) -> Run:
    """A run with the rank's parts of its weights, in host memory where they are offloaded, and
    whole what is not split."""
    whole = [w for w in run.block.weights if not is_sharded(w, policy)]
    if piece is None:
        return shadow(run, whole, [])
    if not policy.config.offload.parameters:
        return shadow(
            run, [*piece.parts, *whole], [piece.gradient] if piece.gradient is not None else []
        )
    parts = [
        Weight(p.path, p.axes, on_host(p.tensor), trainable=p.trainable, kind=p.kind)
        for p in piece.parts
    ]
    return shadow(
        run, [*parts, *whole], [piece.host_gradient] if piece.host_gradient is not None else []
    )


def accumulated(policy: Policy, lowered: Lowered) -> list[tuple[int, list[Segment]]]:
    """(times, segments) of the micro-steps of one step: reduced in each, or whole gradients kept
    until the last.

    Source: accelerate 1.14 accelerator.py no_sync, which the Trainer enters for all micro-steps but
    the last.
    """
    steps = policy.config.gradient_accumulation_steps
    if steps == 1:
        return [(1, lowered(accumulate=False, reduces=True, first=True))]
    if policy.config.parallel.sync_each_batch:
        return [
            (1, lowered(accumulate=False, reduces=True, first=True)),
            (steps - 1, lowered(accumulate=False, reduces=True, first=False)),
        ]
    kept = [(1, lowered(accumulate=False, reduces=False, first=True))]
    if steps > 2:
        kept.append((steps - 2, lowered(accumulate=True, reduces=False, first=True)))
    return [*kept, (1, lowered(accumulate=True, reduces=True, first=True))]


# ---------------------------------------------------------------- what is stored


def load_whole_units(
    runs: list[Run], owned: list[Run], pieces: dict[str, Piece], policy: Policy
) -> list[Segment]:
    """A unit's whole parameters come to the device, are split one by one and go; buffers and
    constants stay. Weights that were packed there are all on it before the first is split.

    FSDP1 concatenates them into the flat parameter before it takes its part. Sources: torch 2.13
    distributed/fsdp/_fully_shard/ _fsdp_init.py _move_states_to_device, _fsdp_param.py
    _init_sharded_param; _flat_param.py _init_flat_param_and_metadata.
    """
    found: list[Segment] = []
    splits: list[Segment] = []
    at_once = packs_on_device(policy)
    for run, mine in zip(runs, owned, strict=True):
        split = [w for w in run.block.weights if is_sharded(w, policy)]
        stay = [
            t
            for w in run.block.weights
            if not w.tied_to
            for t in (_constants(w, policy) if w in split else (w.tensor, *w.constants))
        ]
        wholes = [_whole(w, policy) for w in split]
        parts = [w.tensor for w in mine.block.weights if is_part(w, pieces.get(run.name))]
        events: list[Event] = [(ALLOC, t) for t in stay + wholes]
        cut = _cut(wholes, parts, flat=policy.config.parallel.data_parallel is DataParallel.FSDP1)
        if at_once and cut:
            splits.append(run.segment(f"split of {run.name}", Phase.LOAD, cut))
        else:
            events += cut
        if events:
            found.append(run.segment(f"weights of {run.name}", Phase.LOAD, events))
    return found + splits


def _constants(weight: Weight, policy: Policy) -> tuple[Tensor, ...]:
    """A split weight's constants, as a rank has them."""
    if not policy.stack.quantizer.shards_constants:
        return weight.constants
    ranks = ranks_of(weight, policy)
    return tuple(
        Tensor(t.name, (ceil_div(product(t.axes), ranks),), t.dtype, t.role, t.module, t.source)
        for t in weight.constants
    )


def _whole(weight: Weight, policy: Policy) -> Tensor:
    """A weight as it comes to the device before it is split."""
    stored = weight.tensor
    dtype = stored.dtype if weight.constants else stored_dtype(weight, policy)
    return Tensor(f"whole {stored.name}", stored.axes, dtype, Role.WEIGHTS, weight.path)


def _cut(wholes: list[Tensor], parts: list[Tensor], *, flat: bool) -> list[Event]:
    """The rank's parts of whole parameters, which go: one by one, or out of their `flat` row."""
    if not flat:
        pairs = zip(parts, wholes, strict=True)
        return [event for part, whole in pairs for event in ((ALLOC, part), (FREE, whole))]
    joined = [Tensor(f"{t.name}, flat", t.axes, t.dtype, t.role, t.module) for t in wholes]
    return [
        *((ALLOC, t) for t in joined),
        *((FREE, t) for t in wholes),
        *((ALLOC, t) for t in parts),
        *((FREE, t) for t in joined),
    ]


def is_part(weight: Weight, piece: Piece | None) -> bool:
    """Whether a weight that the rank owns is a part of what is split."""
    return piece is not None and any(
        weight.path == part.path and weight.kind == part.kind for part in piece.parts
    )


def update_of(owned: list[Run], policy: Policy, sizes: dict[str, int]) -> Update:
    """Clipping, states and update of the rank's parts, on the device or all in host memory."""
    if not policy.config.offload.parameters:
        return lower_update(owned, policy, sizes)
    return update_on_host(owned, policy)
