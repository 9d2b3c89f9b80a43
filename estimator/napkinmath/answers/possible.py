"""What no figure can be: a figure that breaks one of these rules is withheld, with the rule's name.

Nothing computes more than a device's peak, the model's own work is a part of all work, and every
figure is a finite number that is not negative. Wrong speeds break them: a calibration of a busy
machine, or a file that was edited.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.figures import Memory
    from napkinmath.timing.schedule import StepTime

_INFINITE = float("inf")
_ROUNDING = 1e-9  # sums of the same terms in another order


def impossible_time(time: StepTime) -> str:
    """Which rule a step's time breaks, in words; empty where it is possible."""
    parts = [x for p in time.phases for x in (p.device_s, p.host_s, p.waited_s)]
    if not all(_is_amount(x) for x in (*parts, time.bubble_s, time.paging_s, time.measured_s)):
        return "a phase takes a time that is negative or no number"
    if not 0 < time.seconds < _INFINITE:
        return "the step takes no time"
    if not (0 <= time.mfu <= time.hfu * (1 + _ROUNDING)):
        return f"the model's work ({time.mfu:.0%} of the peak) exceeds all work ({time.hfu:.0%})"
    if not time.hfu <= 1:
        return f"the step would run at {time.hfu:.0%} of the datasheet's peak"
    return ""


def impossible_memory(memory: Memory) -> str:
    """Which rule the memory figures break, in words; empty where they are possible."""
    for name in ("allocated", "reserved", "device"):
        span = getattr(memory, name)
        if not all(_is_amount(x) for x in (span.low, span.value, span.high)):
            return f"{name} memory is negative or no number"
        if not span.low <= span.value <= span.high:
            return f"{name} memory lies outside its own range"
    if not 0 <= memory.requested <= memory.allocated.value <= memory.reserved.value:
        return "less is allocated than requested, or less reserved than allocated"
    return ""


def _is_amount(value: float) -> bool:
    return 0 <= value < _INFINITE
