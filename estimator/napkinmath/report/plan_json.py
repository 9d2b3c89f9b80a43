"""A plan as JSON: the ranked rows with the options that make them, and what each change of the best
is worth."""

from __future__ import annotations

import json

from napkinmath.planning.grid import figures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.planning.plan import Candidate, Plan
    from napkinmath.planning.trades import Trade


def plan_json(plan: Plan, traded: tuple[Trade, ...], *, tokens: float) -> str:
    """One document: goal, counts, rows best first, trades of the first row."""
    return json.dumps(plan_mapping(plan, traded, tokens=tokens), indent=1)


def plan_mapping(plan: Plan, traded: tuple[Trade, ...], *, tokens: float) -> dict[str, object]:
    """The document before it becomes text."""
    return {
        "model": plan.space.spec.name,
        "goal": plan.goal.value,
        "num_candidates": plan.num_candidates,
        "num_verified": plan.num_verified,
        "tokens": tokens,
        "best": [_row(candidate, tokens) for candidate in plan.best],
        "trades": [
            {"flag": t.flag, "saved_bytes": t.saved_bytes, "speed_ratio": t.speed_ratio}
            for t in traded
        ],
    }


def _row(candidate: Candidate, tokens: float) -> dict[str, object]:
    return {
        "gpu": candidate.machine.hardware.gpu.name,
        "options": dict(candidate.options),
        "changes": list(candidate.changes),
        **figures(candidate.estimate),
        "hours": candidate.hours(tokens) if candidate.tokens_per_s else None,
        "price": candidate.price(tokens),
    }
