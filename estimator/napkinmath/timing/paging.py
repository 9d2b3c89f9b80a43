"""Unified memory that the device has no room for, as paged optimizers leave it to the driver: it
crosses the host link in every step.

Room is what the device has beside the context and the step's peak, which no page can displace. The
update reads and writes the states in one order, step after step, and the driver evicts what was
used longest ago. Once they do not all fit, none is there when its turn comes, so all of them come
in, and go out again since they were written. bitsandbytes asks for each state right before its
update, on the stream that the update runs on (optim/optimizer.py prefetch_state), so that nothing
overlaps.
"""

from __future__ import annotations

from napkinmath.timing.efficiency import host_copy_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.config.hardware import Hardware
    from napkinmath.timing.efficiency import Efficiency


def moved_bytes(managed: Any, peak: Any, hardware: Hardware) -> Any:
    """Bytes of unified memory that a step moves, in and out, by the step's highest requested bytes;
    ints, or arrays in a sweep."""
    if hardware.gpu.unified_memory:
        return 0 * managed
    return 2 * managed * (peak + managed > hardware.usable_bytes)


def paging_s(managed: Any, peak: Any, hardware: Hardware, speed: Efficiency) -> Any:
    """Seconds that a step waits for its pages."""
    moved = moved_bytes(managed, peak, hardware)
    return host_copy_s(moved, True, speed) * (moved > 0)
