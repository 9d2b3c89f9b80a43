"""What of the policy waits on the host while an engine on its GPUs generates.

Sources: verl workers/fsdp_workers.py rollout_mode (param_offload, optimizer_offload); ms-swift
rollout_mixin.py offload_context; NeMo-RL dtensor_policy_worker.py offload_before_refit (states
before the weights are sent), offload_after_refit (the model after). Megatron's buffers of gradients
hold nothing between steps, and are not there while weights are sent: verl and ms-swift
load_megatron_model_to_gpu(load_grad=False), NeMo-RL megatron_policy_worker.py offload_before_refit.
"""

from __future__ import annotations

from napkinmath.config.workload_config import RolloutOffload
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Segment, Step
from napkinmath.lowering.data_parallel.stored import on_host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event

_STATES = (Role.OPTIMIZER, Role.MASTER)
_PARAMETERS = (Role.WEIGHTS, Role.QUANTIZATION, Role.ADAPTERS)


def waits_on_host(
    step: Step, offload: RolloutOffload, what: str, phase: str = "rollout"
) -> tuple[list[Segment], list[Segment]]:
    """(going to the host, coming back) of the policy's 'states' or 'parameters' in a `phase`; nothing
    where they stay."""
    if offload is RolloutOffload.NONE:
        return [], []
    if what == "states":
        # There before the first rollout, as they are before every later one.
        step.load += [
            Segment(s.name, Phase.LOAD, s.events, s.repeat, s.symbols) for s in step.update.states
        ]
        step.update.states = []
        going, coming = _moved(step.load, _STATES, phase)
        if offload is not RolloutOffload.POLICY:
            return going, coming
        dropped, made = _moved(step.load, (Role.GRADIENTS,), phase, copies=False)
        return [*dropped, *going], [*coming, *made]
    if offload is not RolloutOffload.POLICY:
        return [], []
    return _moved(step.load, _PARAMETERS, phase)


def _moved(
    load: list[Segment], roles: tuple[Role, ...], phase: str, *, copies: bool = True
) -> tuple[list[Segment], list[Segment]]:
    kind = Phase.ROLLOUT if phase == "rollout" else Phase.FORWARD
    dropped = {payload for s in load for action, payload in s.events if action == FREE}
    going: list[Segment] = []
    coming: list[Segment] = []
    for segment in load:
        stays = [
            t
            for action, t in segment.events
            if action == ALLOC and isinstance(t, Tensor) and t.role in roles and not t.host_bytes
        ]
        leaves: list[Event] = []
        returns: list[Event] = []
        for t in stays:
            if t in dropped:
                continue
            if not copies:
                leaves.append((FREE, t))
                returns.append((ALLOC, t))
                continue
            host = on_host(t)
            leaves += [(ALLOC, host), _copy(t, to_host=True), (FREE, t)]
            returns += [(ALLOC, t), _copy(t, to_host=False), (FREE, host)]
        names = ("to the host", "back") if copies else ("dropped", "made anew")
        for name, events, into in ((names[0], leaves, going), (names[1], returns, coming)):
            if events:
                label = f"{phase}: {segment.name}, {name}"
                into.append(Segment(label, kind, events, segment.repeat, segment.symbols))
    return going, coming


def _copy(t: Tensor, *, to_host: bool) -> Event:
    """Through pageable memory: the host's copy is made anew each time."""
    return (RUN, Work(None, (HostCopy(t.nbytes, to_host=to_host, pinned=False),), False))
