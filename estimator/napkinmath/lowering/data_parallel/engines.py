"""sharded_step: the step of one rank under FSDP or ZeRO, from the recorded runs of the whole model."""

from __future__ import annotations

from napkinmath.errors import InputError
from napkinmath.ledger import ALLOC, FREE, Phase
from napkinmath.lowering.data_parallel.stored import on_host, shadow
from napkinmath.parallel_config import DataParallel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ledger import Event, Tensor, Value
    from napkinmath.lowering.optimizer import Update
    from napkinmath.lowering.policy import Policy
    from napkinmath.model_spec import ModelSpec
    from napkinmath.step import Run, Segment, Step


def sharded_step(spec: ModelSpec, policy: Policy, runs: list[Run], shared: dict[str, Value]) -> Step:
    """The step under the configured engine; raises InputError for what that engine does not do."""
    kind = policy.config.parallel.data_parallel
    if policy.config.optimizer_in_backward:
        raise InputError(f"optimizer_in_backward is not priced with {kind.value}; leave it out, or use ddp")
    if kind.is_zero:
        from napkinmath.lowering.data_parallel.zero import zero_step

        return zero_step(spec, policy, runs, shared)
    offload = policy.config.offload
    if offload.optimizer and not offload.parameters:
        raise InputError(f"{kind.value} offloads parameters, gradients and optimizer together; use --offload optimizer,parameters")
    if kind is DataParallel.FSDP1:
        from napkinmath.lowering.data_parallel.fsdp1 import flat_step

        return flat_step(spec, policy, runs, shared)
    return fully_sharded_step(spec, policy, runs, shared)


def fully_sharded_step(spec: ModelSpec, policy: Policy, runs: list[Run], shared: dict[str, Value]) -> Step:
    """FSDP2's."""
    from napkinmath.lowering.data_parallel.fsdp2 import FullyShard
    from napkinmath.lowering.data_parallel.pieces import stored_weights
    from napkinmath.lowering.data_parallel.saving import save_sharded
    from napkinmath.step import Step, lower_micro_step

    walker = FullyShard(runs, policy)

    def lowered(*, accumulate: bool, reduces: bool, first: bool) -> list[Segment]:
        return walker.micro_step(lower_micro_step(runs, shared, policy, accumulate=accumulate), reduces=reduces, first=first)

    micro_steps = accumulated(policy, lowered)
    by_name: dict[str, Piece] = {piece.name: piece for unit in walker.units for piece in unit.pieces}
    owned: list[Run] = []
    for run in runs:
        piece = by_name.get(run.name)
        gradient = piece.gradient if piece is not None else None
        parts = piece.parts if piece is not None else []
        owned.append(shadow(run, stored_weights(run, policy, parts), [gradient] if gradient is not None else []))
    if policy.config.offload.parameters:
        owned = [offloaded(run, by_name.get(run.name)) for run in owned]
    load = load_whole_units(runs, owned, policy)
    update = update_of(owned, policy, dict(spec.symbols))
    return Step(spec, policy, runs, load + update.load, micro_steps, update, save_sharded(runs, owned, policy))


def accumulated(policy: Policy, lowered: Lowered) -> list[tuple[int, list[Segment]]]:
    """(times, segments) of the micro-steps of one step: reduced in each, or whole gradients kept until the last.

    Source: accelerate 1.14 accelerator.py no_sync, which the Trainer enters for all micro-steps but the last.
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


def offloaded(run: Run, piece: Piece | None) -> Run:
    """A rank's parts in host memory; what is not split (buffers, constants) stays on the device."""
    from napkinmath.ledger import Weight

    parts = {part.path for part in piece.parts} if piece is not None else set[str]()
    weights = [
        Weight(
            w.path, w.axes, on_host(w.tensor), trainable=w.trainable, kind=w.kind, constants=w.constants, buffer=w.buffer, tied_to=w.tied_to
        )
        if w.path in parts
        else w
        for w in run.block.weights
    ]
    held = [piece.host_gradient] if piece is not None and piece.host_gradient is not None else []
    return shadow(run, weights, held)


def load_whole_units(runs: list[Run], owned: list[Run], policy: Policy) -> list[Segment]:
    """A unit's whole parameters come to the device, are split one by one and go; buffers and constants stay.

    Sources: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_init.py _move_states_to_device, _fsdp_param.py _init_sharded_param.
    """
    from napkinmath.step import Segment

    found: list[Segment] = []
    for run, mine in zip(runs, owned, strict=True):
        events = split_on_device(run, mine, policy)
        if events:
            found.append(Segment(f"weights of {run.name}", Phase.LOAD, events, run.count, run.stage.symbols))
    return found


def split_on_device(run: Run, mine: Run, policy: Policy) -> list[Event]:
    """Whole weights of a run on the device, then each one's part in its place."""
    from napkinmath.ledger import Role, Tensor

    stay: list[Event] = []
    wholes: list[Event] = []
    parts: list[Event] = []
    for weight, part in zip(run.block.weights, mine.block.weights, strict=True):
        if weight.tied_to:
            continue
        stay += [(ALLOC, t) for t in weight.constants]
        if part is weight:
            stay.append((ALLOC, weight.tensor))
            continue
        dtype = weight.tensor.dtype if weight.constants else part.tensor.dtype
        whole = Tensor(f"whole {weight.tensor.name}", weight.tensor.axes, dtype, Role.WEIGHTS, weight.path)
        wholes.append((ALLOC, whole))
        parts += [(ALLOC, part.tensor), (FREE, whole)]
    return stay + wholes + parts


def update_of(owned: list[Run], policy: Policy, sizes: dict[str, int]) -> Update:
    """Clipping, states and update of the rank's parts, on the device or all in host memory."""
    from napkinmath.lowering.optimizer import lower_update

    if not policy.config.offload.parameters:
        return lower_update(owned, policy, sizes)
    from napkinmath.lowering.data_parallel.host import update_on_host

    return update_on_host(owned, policy)


if TYPE_CHECKING:
    from typing import Protocol

    from napkinmath.lowering.data_parallel.pieces import Piece

    class Lowered(Protocol):
        def __call__(self, *, accumulate: bool, reduces: bool, first: bool) -> list[Segment]: ...

    _ = Tensor
