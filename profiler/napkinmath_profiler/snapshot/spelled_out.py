"""What a file with every event of a run may hold: repetitions are spelled out there."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.timeline import Timeline

MOST_EVENTS = 1 << 20


def refuse_long(timeline: Timeline, what: str) -> None:
    """Raises InputError where `what` would hold more than MOST_EVENTS events."""
    count = sum(times * s.repeat * len(s.events) for times, s in timeline.segments.counted())
    if count > MOST_EVENTS:
        raise InputError(
            f"{what} holds every event of a run, at most {MOST_EVENTS:,}, and this one has"
            f" {count:,}; give fewer micro-steps (--grad-accum) or layers: those after the second"
            " are alike"
        )
