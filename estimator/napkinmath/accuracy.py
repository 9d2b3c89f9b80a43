"""Ranges around the figures: the span in which nine of ten measurements that nobody fitted are expected."""

from __future__ import annotations

from napkinmath.estimate import Memory, Range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.estimate import Estimate

# Relative spread (low, high) by figure; to be set by held-out measurements (benchmarks/published.py).
SPREADS = {"allocated": (0.96, 1.04), "reserved": (0.95, 1.07), "device": (0.94, 1.10)}


def memory_ranges(e: Estimate) -> Memory:
    """Requested, allocated, reserved and device peaks, each with its span."""
    replay = e.replay
    context = e.hardware.context_bytes if e.hardware is not None else 0
    return Memory(
        requested=e.peak.nbytes,
        allocated=_spread("allocated", replay.peak_allocated),
        reserved=_spread("reserved", replay.peak_reserved),
        device=_spread("device", replay.peak_reserved + context),
    )


def _spread(kind: str, value: int) -> Range:
    low, high = SPREADS[kind]
    return Range(low=low * value, value=value, high=high * value)
