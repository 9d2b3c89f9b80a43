"""Ranges around the figures: the span in which nine of ten measurements that nobody fitted are expected."""

from __future__ import annotations

from napkinmath.allocator import replay
from napkinmath.estimate import Memory, Range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.allocator import Replay
    from napkinmath.estimate import Estimate

# Relative spread (low, high) by figure; to be set by held-out measurements (benchmarks/published.py).
SPREADS = {"allocated": (0.96, 1.04), "reserved": (0.95, 1.07), "device": (0.94, 1.10), "seconds": (0.85, 1.25)}


def memory_ranges(e: Estimate) -> Memory:
    """Requested, allocated, reserved and device peaks, each with its span."""
    books = within_device(e)
    context = e.hardware.context_bytes if e.hardware is not None else 0
    reserved = _spread("reserved", books.peak_reserved)
    device = _spread("device", books.peak_reserved + context)
    if len(e.replays) > 1:
        reserved, device = over_orders(e, reserved, 0), over_orders(e, device, context)
    return Memory(requested=e.peak.nbytes, allocated=_spread("allocated", books.peak_allocated), reserved=reserved, device=device)


def over_orders(e: Estimate, span: Range, context: int) -> Range:
    """The span widened to what the orders of lengths that were replayed reserved, as far as the device lets them."""
    ceiling = e.hardware.usable_bytes if e.hardware is not None else None
    found = [r.peak_reserved if ceiling is None else min(r.peak_reserved, max(ceiling, r.peak_allocated)) for r in e.replays]
    return Range(low=min(span.low, found[0] + context), value=span.value, high=max(span.high, found[-1] + context))


def seconds_range(e: Estimate) -> Range | None:
    """Seconds of a steady step with their span; None where the hardware has no known speed."""
    found = e.time
    return None if found is None else _spread("seconds", found.seconds)


def tokens_range(e: Estimate) -> Range | None:
    """Tokens a second, from the span of the seconds."""
    seconds, found = seconds_range(e), e.time
    return (
        None
        if seconds is None or found is None
        else Range(low=found.tokens / seconds.high, value=found.tokens / seconds.value, high=found.tokens / seconds.low)
    )


def within_device(e: Estimate) -> Replay:
    """The replay under what the device offers, where the free-running one would reserve more and the step goes through all the same.

    A full device makes the allocator return its cached segments and try again, so that reservation never shows more than there is.
    """
    free = e.replay
    if e.hardware is None or free.peak_reserved <= e.hardware.usable_bytes or free.out_of_memory:
        return free
    if free.peak_allocated > e.hardware.usable_bytes:
        return free
    limited = replay(e.timeline, e.settings.replace(limit_bytes=e.hardware.usable_bytes))
    return free if limited.out_of_memory else limited


def _spread(kind: str, value: float) -> Range:
    low, high = SPREADS[kind]
    return Range(low=low * value, value=value, high=high * value)
