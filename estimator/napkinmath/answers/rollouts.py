"""What an engine's rollouts take of a step, and which GPUs wait for them."""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.ir.costs import EngineRun
from napkinmath.ir.ledger import Work
from napkinmath.lowering.rollout.plan import EnginePlan
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.rollouts import RolloutTime, engine_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate


class Rollouts(Record):
    """An engine's placement, its time in a step, and the waiting on both sides."""

    plan: EnginePlan
    time: RolloutTime
    step_s: float
    policy_s: float
    """Seconds in which the policy's GPUs work."""

    @property
    def policy_waits_s(self) -> float:
        """Of a step the policy's GPUs wait for rollouts; where engines share them, 0."""
        return max(0.0, self.step_s - self.policy_s) if self.plan.apart else 0.0

    @property
    def engine_waits_s(self) -> float:
        """Of a step GPUs of the engines' own wait for the policy."""
        return max(0.0, self.step_s - self.time.seconds) if self.plan.apart else 0.0


def rollouts_of(e: Estimate) -> Rollouts | None:
    """The rollouts of an estimate with an engine and a GPU of known speed; else None."""
    plan, whole = e.ranks.policy.rollout, e.time
    gpu = e.hardware.gpu if e.hardware is not None else None
    if not isinstance(plan, EnginePlan) or whole is None or gpu is None:
        return None
    cost = _run(e)
    time = engine_time(cost, Bindings(e.step.symbols), default_efficiency(gpu))
    own = whole.own_s if plan.staleness else whole.seconds - time.seconds
    return Rollouts(plan=plan, time=time, step_s=whole.seconds, policy_s=own)


def _run(e: Estimate) -> EngineRun:
    """The engine's run in the step."""
    for _, segments in e.step.micro_steps:
        for segment in segments:
            for _, payload in segment.events:
                if isinstance(payload, Work) and isinstance(payload.costs[0], EngineRun):
                    return payload.costs[0]
    raise AssertionError("an engine's plan has a run in its step")
