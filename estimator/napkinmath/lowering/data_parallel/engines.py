"""sharded_step: the step of one rank under FSDP or ZeRO, from the recorded runs of the whole
model."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Role, Tensor, Weight
from napkinmath.lowering.data_parallel.main_gradients import (
    distributed_optimizer_step,
    keeps_main_gradients,
)
from napkinmath.lowering.data_parallel.stored import is_sharded, on_host, shadow, stored_dtype

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event, Value
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run, Segment, Step
    from napkinmath.lowering.optimizer import Update
    from napkinmath.lowering.policy import Policy


def sharded_step(
    spec: ModelSpec,
    policy: Policy,
    runs: list[Run],
    shared: dict[str, Value],
    chunks: list[list[Run]],
    pipeline_rank: int,
) -> Step:
    """The step under the configured engine, of a pipeline's rank if there are `chunks`; raises
    InputError for what that engine does not do."""
    kind = policy.config.parallel.data_parallel
    if kind is DataParallel.ZERO1 and keeps_main_gradients(policy):
        turns = pipelined_steps(chunks, shared, policy, pipeline_rank) if chunks else None
        return distributed_optimizer_step(spec, policy, runs, shared, turns)
    if chunks and kind is DataParallel.ZERO1:
        from napkinmath.lowering.data_parallel.zero import whole_parameters_step

        return whole_parameters_step(
            spec, policy, runs, shared, pipelined_steps(chunks, shared, policy, pipeline_rank)
        )
    if chunks and kind is DataParallel.FSDP2:
        return staged_step(spec, policy, runs, shared, chunks, pipeline_rank)
    if chunks:
        raise InputError(
            f"{kind.value} within a pipeline: no engine runs it (DeepSpeed's take ZeRO 1 at most);"
            " use fsdp2, zero1 or ddp with it"
        )
    if policy.config.optimizer_in_backward:
        raise InputError(
            f"optimizer_in_backward is not priced with {kind.value}; leave it out, or use ddp"
        )
    if kind.is_zero:
        from napkinmath.lowering.data_parallel.zero import zero_step

        return zero_step(spec, policy, runs, shared)
    offload = policy.config.offload
    if offload.optimizer and not offload.parameters:
        raise InputError(
            f"{kind.value} offloads parameters, gradients and optimizer together; use --offload"
            " optimizer,parameters"
        )
    return fully_sharded_step(spec, policy, runs, shared)


def pipelined_steps(
    chunks: list[list[Run]], shared: dict[str, Value], policy: Policy, pipeline_rank: int
) -> list[tuple[int, list[Segment]]]:
    """A pipeline rank's turns in its schedule's order, the last one by itself."""
    from napkinmath.lowering.parallel.pipeline import pipelined

    turns = pipelined(chunks, shared, policy, pipeline_rank)
    times, last = turns[-1]
    return turns if times == 1 else [*turns[:-1], (times - 1, last), (1, last)]


def fully_sharded_step(
    spec: ModelSpec, policy: Policy, runs: list[Run], shared: dict[str, Value]
) -> Step:
    """FSDP's, of either generation: they differ in what a unit's pieces are."""
    from napkinmath.ir.step import Step, lower_micro_step
    from napkinmath.lowering.data_parallel.fsdp2 import FullyShard
    from napkinmath.lowering.data_parallel.saving import save_sharded

    walker = FullyShard(runs, policy)

    def lowered(*, accumulate: bool, reduces: bool, first: bool) -> list[Segment]:
        segments = lower_micro_step(runs, shared, policy, accumulate=accumulate and not walker.sums)
        return walker.micro_step(
            segments, reduces=reduces, first=first, held=accumulate and walker.sums
        )

    micro_steps = accumulated(policy, lowered)
    pieces = {piece.name: piece for unit in walker.units for piece in unit.pieces}
    owned = [owned_by_rank(run, pieces.get(run.name), policy) for run in runs]
    load = load_whole_units(runs, owned, pieces, policy)
    update = update_of(owned, policy, dict(spec.symbols))
    return Step(
        spec,
        policy,
        runs,
        load + update.load,
        micro_steps,
        update,
        save_sharded(runs, owned, policy),
    )


def staged_step(
    spec: ModelSpec,
    policy: Policy,
    runs: list[Run],
    shared: dict[str, Value],
    chunks: list[list[Run]],
    pipeline_rank: int,
) -> Step:
    """FSDP2 within a pipeline: each chunk of a rank's model is gathered once and its gradients
    reduced once."""
    from napkinmath.ir.step import Step
    from napkinmath.lowering.data_parallel.fsdp2_stages import ShardedStages
    from napkinmath.lowering.data_parallel.saving import save_sharded
    from napkinmath.lowering.parallel.pipeline import waiting_buffers

    parallel, config = policy.config.parallel, policy.config
    if parallel.reshards:
        raise InputError(
            "reshard_after_forward within a pipeline would gather every micro-batch's parameters"
            " anew; leave it out"
        )
    if config.offload.parameters or config.offload.optimizer or config.optimizer_in_backward:
        raise InputError(
            "fsdp2 within a pipeline is not priced with offloading or optimizer_in_backward; leave"
            " them out"
        )
    stages = ShardedStages(chunks, shared, policy, pipeline_rank)
    pieces = {
        piece.name: piece
        for walker in stages.walkers
        for unit in walker.units
        for piece in unit.pieces
    }
    owned = [owned_by_rank(run, pieces.get(run.name), policy) for run in runs]
    load = load_whole_units(runs, owned, pieces, policy) + waiting_buffers(
        chunks, policy, pipeline_rank
    )
    micro_steps = stages.micro_steps()
    update = update_of(owned, policy, dict(spec.symbols))
    return Step(
        spec,
        policy,
        runs,
        load + update.load,
        micro_steps,
        update,
        save_sharded(runs, owned, policy),
    )


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
    constants stay.

    FSDP1 concatenates them into the flat parameter before it takes its part. Sources: torch 2.13
    distributed/fsdp/_fully_shard/ _fsdp_init.py _move_states_to_device, _fsdp_param.py
    _init_sharded_param; _flat_param.py _init_flat_param_and_metadata.
    """
    from napkinmath.ir.step import Segment

    flat = policy.config.parallel.data_parallel is DataParallel.FSDP1
    found: list[Segment] = []
    for run, mine in zip(runs, owned, strict=True):
        stay = [
            t
            for w in run.block.weights
            if not w.tied_to
            for t in ((w.tensor, *w.constants) if not is_sharded(w, policy) else w.constants)
        ]
        wholes = [
            Tensor(
                f"whole {w.tensor.name}",
                w.tensor.axes,
                w.tensor.dtype if w.constants else stored_dtype(w, policy),
                Role.WEIGHTS,
                w.path,
            )
            for w in run.block.weights
            if is_sharded(w, policy)
        ]
        parts = [w.tensor for w in mine.block.weights if is_part(w, pieces.get(run.name))]
        events: list[Event] = [(ALLOC, t) for t in stay + wholes]
        if flat:
            joined = [Tensor(f"{t.name}, flat", t.axes, t.dtype, t.role, t.module) for t in wholes]
            events += [
                *((ALLOC, t) for t in joined),
                *((FREE, t) for t in wholes),
                *((ALLOC, t) for t in parts),
                *((FREE, t) for t in joined),
            ]
        else:
            events += [
                e
                for part, whole in zip(parts, wholes, strict=True)
                for e in ((ALLOC, part), (FREE, whole))
            ]
        if events:
            found.append(
                Segment(f"weights of {run.name}", Phase.LOAD, events, run.count, run.stage.symbols)
            )
    return found


def is_part(weight: Weight, piece: Piece | None) -> bool:
    """Whether a weight that the rank owns is a part of what is split."""
    return piece is not None and any(
        weight.path == part.path and weight.kind == part.kind for part in piece.parts
    )


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
