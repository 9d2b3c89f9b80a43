"""Models with weights of their own that only run forward in a step, a reference or a teacher: how a
rank stores them, and where they lie between uses."""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel, Sharding
from napkinmath.config.workload_config import Placement
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Tensor, Work
from napkinmath.ir.step import Segment
from napkinmath.lowering.data_parallel.forward_only import gathered, stored
from napkinmath.lowering.data_parallel.stored import on_host, splits_parameters
from napkinmath.lowering.forwards import NoGradForward
from napkinmath.lowering.lifecycle import load_segments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.catalog.kernels import KernelSet
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.lowering.policy import Policy


def placed(
    spec: ModelSpec,
    policy: Policy,
    config: TrainConfig,
    names: tuple[str, ...],
    at: Placement,
    *,
    prepared: bool,
    pipeline_rank: int,
    patch: KernelSet | None = None,
    as_policy: bool = False,
) -> tuple[list[Segment], list[NoGradForward]]:
    """(loading, forwards by name) of a model with weights of its own; `prepared`: its trainer
    shards it under FSDP, `as_policy` in units as it does the policy. `patch` runs its operations.

    Sources: trl 1.16 models/utils.py prepare_fsdp (FSDP2: the model is one unit), prepare_deepspeed
    (stage 3, else stage 0); gkd_trainer.py, grpo_trainer.py accelerator.prepare_model with
    evaluation_mode, which wraps nothing.
    """
    if at is Placement.APART:
        return [], []
    as_policy = as_policy or at in (Placement.SHARDED, Placement.SWAP)
    stored_at = Placement.SHARDED if as_policy and at is Placement.OFFLOAD else at
    parallel = _parallel_of(config.parallel, stored_at, prepared=prepared)
    still = config.replace(parallel=parallel)
    forward = NoGradForward(
        spec, policy, still, own=False, pipeline_rank=pipeline_rank, patch=patch
    )
    sizes, quiet = dict(forward.spec.symbols), forward.policy
    # FSDP1 never reshards the root that no backward follows (_runtime_utils.py _post_forward_reshard)
    stays = parallel.data_parallel is DataParallel.FSDP1 and not as_policy
    if quiet.shards and splits_parameters(parallel):
        loaded = stored(forward.runs, quiet, sizes, stays=stays)
        forward.segments = gathered(forward.segments, forward.runs, quiet, sizes, stays=stays)
    else:
        loaded = load_segments(forward.runs, quiet)
    for segment in loaded:
        segment.name = f"{names[-1]}: {segment.name}"
        segment.symbols = (*forward.spec.symbols, *segment.symbols)
    forwards = [forward.called(name) for name in names]
    if at in (Placement.OFFLOAD, Placement.SWAP):
        loaded, brought, left = (
            _in_the_policys_place(loaded)
            if at is Placement.SWAP
            else _brought(loaded, pinned=config.offload.pinned)
        )
        # the weights come before the first of the forwards and go after the last
        forwards[0].ahead, forwards[-1].behind = brought, left
    return loaded, forwards


def _parallel_of(parallel: ParallelConfig, at: Placement, *, prepared: bool) -> ParallelConfig:
    """The mesh as it stores a model that is not trained."""
    kind = parallel.data_parallel
    if not splits_parameters(parallel) or at is Placement.SWAP:
        return parallel
    if at is Placement.SHARDED:  # what goes forward alone is not kept for a backward: torchtune
        # recipes/dev/grpo_full_finetune_distributed.py, verl workers/fsdp_workers.py of its ref
        keeps = kind is DataParallel.FSDP2 and parallel.sharding is Sharding.GRAD_OP
        return parallel.replace(sharding=Sharding.FULL) if keeps else parallel
    if at is not Placement.WHOLE and (prepared or kind is DataParallel.ZERO3):
        return parallel.replace(wrap="none") if kind is DataParallel.FSDP2 else parallel
    whole = DataParallel.ZERO1 if kind is DataParallel.ZERO3 else DataParallel.DDP
    zero = parallel.zero.replace(hpz_partition_size=1, mics_shard_size=0)
    return parallel.replace(data_parallel=whole, sharding=Sharding.FULL, shard_size=0, zero=zero)


def _brought(
    loaded: list[Segment], *, pinned: bool
) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """(loading into host memory, coming to the device, going from it) of what loading leaves."""
    brought: list[Segment] = []
    left: list[Segment] = []
    for segment, stays in _stays(loaded):
        events: list[Event] = []
        for t in stays:
            copied = HostCopy(t.nbytes, to_host=False, pinned=pinned)
            events += [(ALLOC, t), (RUN, Work(None, (copied,), False))]
        dropped: list[Event] = [(FREE, t) for t in stays]
        brought.append(_moving(segment, "to the device", events))
        left.append(_moving(segment, "dropped", dropped))
        _load_on_host(segment, stays)
    return loaded, brought, left


def _in_the_policys_place(
    loaded: list[Segment],
) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """(loading into host memory, coming to the device, going from it) of weights that are written over
    the policy's, which are copied to the host before and back afterwards.

    Pageable memory both ways: NeMo-RL 0.6 models/policy/workers/megatron_policy_worker.py
    use_reference_model (state_dict to the CPU, load_state_dict), models/megatron/setup.py
    setup_reference_model_state.
    """
    brought: list[Segment] = []
    left: list[Segment] = []
    for segment, stays in _stays(loaded):
        events: list[Event] = []
        returned: list[Event] = []
        for t in stays:
            policys, (out, back) = on_host(t), _pageable(t)
            events += [(ALLOC, policys), out, back]
            returned += [back, (FREE, policys)]
        brought.append(_moving(segment, "in the policy's place", events))
        left.append(_moving(segment, "the policy's back", returned))
        _load_on_host(segment, stays)
    return loaded, brought, left


def _pageable(t: Tensor) -> tuple[Event, Event]:
    """Copies of a tensor (to the host, from it)."""
    out, back = (
        (RUN, Work(None, (HostCopy(t.nbytes, to_host=to_host, pinned=False),), False))
        for to_host in (True, False)
    )
    return out, back


def _stays(loaded: list[Segment]) -> list[tuple[Segment, list[Tensor]]]:
    """Each segment of a loading with the tensors that it leaves."""
    goes = {payload for s in loaded for action, payload in s.events if action == FREE}
    return [
        (
            segment,
            [
                t
                for action, t in segment.events
                if action == ALLOC and isinstance(t, Tensor) and t not in goes
            ],
        )
        for segment in loaded
    ]


def _moving(segment: Segment, what: str, events: list[Event]) -> Segment:
    return Segment(
        f"{segment.name}, {what}", Phase.FORWARD, events, segment.repeat, segment.symbols
    )


def _load_on_host(segment: Segment, stays: list[Tensor]) -> None:
    """The segment loads its tensors into host memory."""
    hosts = {t: on_host(t) for t in stays}
    kept: list[Event] = []
    for action, payload in segment.events:
        held = hosts.get(payload) if isinstance(payload, Tensor) else None
        kept.append((action, payload if held is None else held))
    segment.events = kept
