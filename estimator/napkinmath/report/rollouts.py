"""The engine's rollouts in words and in JSON: how many sequences, where their time goes, and which
GPUs wait for them."""

from __future__ import annotations

from napkinmath.base.units import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.rollouts import Rollouts


def rollout_words(e: Estimate) -> list[str]:
    """Parts of the report's line; [] where no engine generates."""
    found = _found(e)
    if found is None:
        return []
    time, plan = found.time, found.plan
    engines = f"{plan.engines} engines" if plan.engines > 1 else "1 engine"
    plural = "" if time.sequences == 1 else "s"
    parts = [
        f"{engines}, each {time.sequences:,} sequence{plural}, {time.at_once:,} at once",
        f"prompts {format_seconds(time.prompts_s)}, tokens {format_seconds(time.tokens_s)}",
    ]
    if time.sent_s:
        parts[-1] += f", weights {format_seconds(time.sent_s)}"
    if time.tail_s:
        parts.append(f"fewer than half run in the last {format_seconds(time.tail_s)}")
    if time.waits_s:
        parts.append(f"other engines wait {format_seconds(time.waits_s)} for the longest")
    return parts + _waiting(found)


def _waiting(found: Rollouts) -> list[str]:
    """Which GPUs wait for which."""
    if not found.plan.apart:
        return []
    return [
        f"the policy's GPUs wait {format_seconds(found.policy_waits_s)} a step, the engines'"
        f" {format_seconds(found.engine_waits_s)}"
    ]


def rollout_json(e: Estimate) -> dict[str, Any] | None:
    """The same as a mapping; None where no engine generates."""
    found = _found(e)
    if found is None:
        return None
    time = found.time
    return {
        "engines": found.plan.engines,
        "sequences": time.sequences,
        "at_once": time.at_once,
        "seconds": time.seconds,
        "prompts_s": time.prompts_s,
        "tokens_s": time.tokens_s,
        "sent_s": time.sent_s,
        "tail_s": time.tail_s,
        "waits_s": time.waits_s,
        "policy_waits_s": found.policy_waits_s,
        "engine_waits_s": found.engine_waits_s,
    }


def _found(e: Estimate) -> Rollouts | None:
    if not e.config.workload.has_engine or e.time is None:
        return None
    from napkinmath.answers.rollouts import rollouts_of

    return rollouts_of(e)
