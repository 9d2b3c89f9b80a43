"""Timelines of very many events: the large pool played whole, the small one in two shorter timelines.

Experts that are modules of their own allocate some hundred small tensors each, so nearly all events
of such a model are of the small pool. Without a limit the pools do not touch each other. The large
one, whose holes decide most, is soon played. The small one has segments of 2 MiB, so what it holds
grows evenly with the layers, block by block: two timelines with few of them give the lines. Tests
hold both together to whole replays.
"""

from __future__ import annotations

from napkinmath.base.cuda import ALLOCATION_GRANULE, SMALL_LIMIT, SMALL_SEGMENT
from napkinmath.base.units import round_up
from napkinmath.ir.timeline import highest
from napkinmath.memory.long_runs import busiest_count, lessened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.order import Order
    from napkinmath.ir.timeline import TimelineSegment
    from napkinmath.memory.allocator_settings import AllocatorSettings
    from napkinmath.memory.books import Peaks

    Figures = dict[str, int]
    Play = Callable[[Order[TimelineSegment], list[int]], tuple[Figures, Peaks]]

FEW = 4  # copies of a layer by which the two shorter timelines differ
EVEN = 0.005  # of the small pool: as much as its growth may leave open


def pools_apart(
    order: Order[TimelineSegment], sizes: list[int], settings: AllocatorSettings, play: Play
) -> Figures | None:
    """The figures of a timeline on a device without a limit, from those of both pools; None where
    one pool decides on the other, or where the small one does not yet grow evenly in the two
    shorter timelines."""
    if settings.garbage_collection_threshold or settings.roundup_power2_divisions > 1:
        return None  # what one pool holds decides what the other returns, or all sizes are others
    if any(one.empties for _, one in order.counted()):
        return None
    count = busiest_count(order, sizes, FEW)
    if count is None:
        return None
    large = [size if size > SMALL_LIMIT else 0 for size in sizes]
    small = [size if size <= SMALL_LIMIT else 0 for size in sizes]
    (low, low_peaks), (high, high_peaks) = (
        play(lessened(order, [count], (steps,), sizes), small) for steps in (0, 1)
    )
    peaks = _small_peaks(low_peaks, high_peaks, count.most)
    if peaks is None:
        return None
    found, large_peaks = play(order, large)
    both = {name: found[name] + low[name] + count.most * (high[name] - low[name]) for name in found}
    # A segment is made only where none is free as a whole: the last, where most could not have been
    # returned. Which block that is can change with the count.
    reserved = max(peaks.values())
    both["peak_reserved"] = found["peak_reserved"] + reserved
    both["end_reserved"] = found["end_reserved"] + reserved
    both["num_segments"] = found["num_segments"] + -(-reserved // SMALL_SEGMENT)
    # a large block can have up to 1 MiB more than was asked for
    unsplit = found["peak_allocated"] - _booked_at_most(order, large)
    both["peak_allocated"] = _booked_at_most(order, sizes) + unsplit
    both["peak_unreturnable"] = max(large_peaks[key][0] + more for key, more in peaks.items())
    return both


def _small_peaks(low: Peaks, high: Peaks, most: int) -> dict[int, int] | None:
    """Of each list of events the most bytes of the small pool that could not have been returned.

    A layer's temporaries leave segments that what is kept fills first: until it has filled them,
    these bytes grow by less than what is booked. So the line is taken only where it comes to the
    same with the growth of what is booked.
    """
    found: dict[int, int] = {}
    at_most = 0
    for key, (bytes_low, booked_low) in low.items():
        bytes_high, booked_high = high[key]
        more, booked = bytes_high - bytes_low, booked_high - booked_low
        found[key] = bytes_low + most * more
        at_most = max(at_most, bytes_high + (most - 1) * max(more, booked))
    return found if at_most <= max(found.values()) * (1 + EVEN) else None


def _booked_at_most(order: Order[TimelineSegment], sizes: list[int]) -> int:
    return highest(order, [round_up(size, ALLOCATION_GRANULE) for size in sizes])
