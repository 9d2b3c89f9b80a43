"""The policy's weights on their way to an inference engine: what is whole at once, and its copies.

Sources: trl 1.16 generation/vllm_generation.py _iter_named_params (DTensor.full_tensor, FSDP 1
summon_full_params of a unit, DeepSpeed GatheredParameters); verl workers/rollout/vllm_rollout
update_weights: each parameter is cast and copied into a buffer that is sent when it is full.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, UINT8, find_dtype
from napkinmath.base.expr import ceil_div
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.workload_config import RolloutSync
from napkinmath.ir.costs import Collective, Move, Repeated
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment, segments
from napkinmath.lowering.data_parallel.holders import is_spread
from napkinmath.lowering.data_parallel.stored import (
    is_sharded,
    ranks_of,
    row_shard,
    splits_parameters,
    stored_dtype,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.base.dtypes import DType
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.rollout.plan import EnginePlan

_SENT = "rollout: weights to the engine"


class _Parts:
    """Of some parameters of a run: what makes them whole, what is done with them, what is dropped
    after."""

    __slots__ = ("closed", "opened", "read")

    def __init__(self, opened: list[Event], read: list[Event], closed: list[Event]) -> None:
        self.opened, self.read, self.closed = opened, read, closed


def weights_sent(plan: EnginePlan, runs: list[Run], policy: Policy) -> list[Segment]:
    """All parameters go to the engine, adapters merged into them."""
    sync = plan.sync if policy.shards else RolloutSync.PARAMETER
    buffer = Tensor("buffer of weights", (plan.bucket_bytes,), UINT8, Role.COMMUNICATION)
    has_buffer = plan.sync is RolloutSync.BUCKET
    opened = [Segment("rollout: buffer made", Phase.ROLLOUT, [(ALLOC, buffer)])]
    closed = [Segment("rollout: buffer dropped", Phase.ROLLOUT, [(FREE, buffer)])]
    return [
        *(opened if has_buffer else ()),
        *_sent_by(sync, runs, lambda w: _sent(w, plan, policy), plan.batches),
        *(closed if has_buffer else ()),
    ]


def _own(run: Run) -> list[Weight]:
    return [
        w
        for w in run.block.weights
        if not w.buffer and not w.tied_to and w.tensor.role is not Role.ADAPTERS
    ]


def _sent_by(
    sync: RolloutSync, runs: list[Run], parts_of: Callable[[Weight], _Parts], batches: int = 0
) -> list[Segment]:
    """Every parameter on its way, as many whole at once as `sync` has."""
    if sync in (RolloutSync.PARAMETER, RolloutSync.BUCKET):

        def one_by_one(run: Run) -> list[Event]:
            parts = [parts_of(w) for w in _own(run)]
            return [e for p in parts for e in (*p.opened, *p.read, *p.closed)]

        return segments(_SENT, Phase.ROLLOUT, runs, one_by_one)
    if sync is RolloutSync.WHOLE:
        return _together(runs, parts_of)
    outside = [run for run in runs if not run.stage.checkpointed]
    layers = [run for run in runs if run.stage.checkpointed]
    number = sum(run.count for run in layers)
    together = -(-number // min(batches or number, number)) if layers else 1
    return [
        *(s for run in layers for s in _at_once(run, parts_of, together)),
        *_together(outside, parts_of),
    ]


def _at_once(run: Run, parts_of: Callable[[Weight], _Parts], together: int = 1) -> list[Segment]:
    """The parameters of each layer of a run together, with those of the other layers of its
    batch."""
    parts = [parts_of(w) for w in _own(run)]
    events = [e for name in _Parts.__slots__[::-1] for p in parts for e in getattr(p, name)]
    sent = segments(_SENT, Phase.ROLLOUT, [run], lambda _: events)
    if together == 1:
        return sent
    whole = {t: action for p in parts for action, t in p.opened if isinstance(t, Tensor)}
    each = sum(t.nbytes for t, action in whole.items() if action == ALLOC)
    others = Tensor(
        "other layers of the batch", (each * (together - 1),), UINT8, Role.COMMUNICATION
    )
    made, dropped = (
        segments(f"{_SENT}, batch", Phase.ROLLOUT, [run], lambda _, does=does: [(does, others)])
        for does in (ALLOC, FREE)
    )
    for segment in (*made, *dropped):
        segment.repeat = 1
    return [*made, *sent, *dropped]


def _together(runs: list[Run], parts_of: Callable[[Weight], _Parts]) -> list[Segment]:
    """The parameters of all of these runs together."""
    parts = {run.name: [parts_of(w) for w in _own(run)] for run in runs}
    found: list[Segment] = []
    for field, label in (
        ("opened", "rollout: whole weights"),
        ("read", _SENT),
        ("closed", "rollout: whole weights dropped"),
    ):
        found += segments(
            label,
            Phase.ROLLOUT,
            runs,
            lambda run, field=field: [e for p in parts[run.name] for e in getattr(p, field)],
        )
    return found


def state_dict(
    plan: EnginePlan, runs: list[Run], policy: Policy
) -> tuple[list[Segment], list[Segment]]:
    """(making, dropping) of a sharded state dict of FSDP 1, which the weights are sent from: each
    unit is gathered, and the rank's part of each parameter copied (torch 2.13
    fsdp/_state_dict_utils.py _sharded_post_state_dict_hook). It is there before the engine wakes
    (verl v0.3 to v0.6 workers/sharding_manager/fsdp_vllm.py)."""
    flat = policy.config.parallel.data_parallel is DataParallel.FSDP1
    trainer = plan.trainer
    if not (flat and trainer.copies_shards and plan.sync is trainer.flat_sync):
        return [], []
    copies = {
        w: row_shard(w, stored_dtype(w, policy), ranks_of(w, policy), Role.COMMUNICATION)
        for run in runs
        for w in _own(run)
        if is_sharded(w, policy)
    }

    def parts_of(weight: Weight) -> _Parts:
        opened, closed = _gathered(weight, policy)
        mine = copies.get(weight)
        read: list[Event] = []
        if mine is not None:
            read = [(ALLOC, mine), (RUN, Work(None, (Move(2 * mine.nbytes),), False))]
        return _Parts(opened, read, closed)

    made = _sent_by(RolloutSync.LAYER, runs, parts_of)
    for segment in made:
        segment.name = segment.name.replace("weights to the engine", "state dict")
    dropped = segments(
        "rollout: state dict dropped",
        Phase.ROLLOUT,
        runs,
        lambda run: [(FREE, copies[w]) for w in _own(run) if w in copies],
    )
    return made, dropped


def _merged(weight: Weight, policy: Policy) -> list[Event]:
    """peft tuners/lora/layer.py get_delta_weight: an adapter's product, in fp32."""
    if not policy.targets(weight.path.removesuffix(".weight"), weight.kind):
        return []
    delta = Tensor("adapters' product", weight.axes, FP32, Role.WORKSPACE, weight.path)
    return [
        (ALLOC, delta),
        (RUN, Work(None, (Move(3 * delta.nbytes, 3),), False)),
        (FREE, delta),
    ]


def _kept_type(weight: Weight, policy: Policy) -> DType:
    """What a parameter is gathered in."""
    if policy.config.parallel.data_parallel.is_fsdp:
        return stored_dtype(weight, policy)
    return weight.tensor.dtype


def _gathered(weight: Weight, policy: Policy) -> tuple[list[Event], list[Event]]:
    """(making it whole, dropping it); nothing where every rank has it, as under ZeRO stages 1 and 2. Of a pipeline every rank gets
    the weights of all stages (Megatron-Bridge models/conversion/param_mapping.py
    broadcast_from_pp_rank, verl utils/megatron_utils.py broadcast_from_megatron_pp): a stage's part is
    broadcast, then gathered."""
    parallel = policy.config.parallel
    parts, stages = _parts(weight, policy), parallel.pipeline_parallel_size
    ranks = parallel.data_parallel_size if splits_parameters(parallel) else 1
    if ranks == parts == stages == 1:
        return [], []
    dtype = _kept_type(weight, policy)
    name = "weight on its way to the engine"
    axes = (parts, *weight.tensor.axes) if parts > 1 else weight.tensor.axes
    whole = Tensor(name, axes, dtype, Role.COMMUNICATION, weight.path)
    events: list[Event] = [(ALLOC, whole)]
    spread = is_spread(weight.path, parallel)
    if stages > 1:
        own = ceil_div(whole.nbytes, parts)
        sent = Collective("broadcast", own, ranks=stages, axis="pipeline", overlaps=False)
        events.append((RUN, Work(None, (Repeated(sent, stages),), False)))
    for number, axis in (
        (ranks, "data"),
        (parallel.tensor_parallel_size if parts > 1 and not spread else 1, "tensor"),
        (parallel.expert_parallel_size if spread else 1, "expert"),
        (parallel.expert_tensor_ranks if spread else 1, "expert tensor"),
    ):
        if number > 1:
            gather = Collective("all-gather", whole.nbytes, ranks=number, axis=axis, overlaps=False)
            events.append((RUN, Work(None, (Repeated(gather, stages),), False)))
    return events, [(FREE, whole)]


def _parts(weight: Weight, policy: Policy) -> int:
    """Of how many parts the whole is made that ranks compute with: matrices are cut over tensor
    ranks, experts over theirs."""
    parallel = policy.config.parallel
    if is_spread(weight.path, parallel):
        return parallel.expert_parallel_size * parallel.expert_tensor_ranks
    return parallel.tensor_parallel_size if len(weight.axes) > 1 else 1


def _sent(weight: Weight, plan: EnginePlan, policy: Policy) -> _Parts:
    """One parameter: gathered, cast where it goes through a buffer, copied."""
    opened, closed = _gathered(weight, policy)
    kept, wanted = _kept_type(weight, policy), find_dtype(plan.model.dtype)
    more = [kept] * plan.trainer.copies
    if plan.sync is RolloutSync.BUCKET and kept.bits > wanted.bits:
        more.append(wanted)
    moved = weight.tensor.nbytes
    for dtype in more:
        copy = Tensor(
            "copy of a weight", weight.tensor.axes, dtype, Role.COMMUNICATION, weight.path
        )
        opened.append((ALLOC, copy))
        closed.append((FREE, copy))
    read = _merged(weight, policy)
    read.append((RUN, Work(None, (Move(2 * moved, 1 + len(more)),), False)))
    return _Parts(opened, read, closed)
