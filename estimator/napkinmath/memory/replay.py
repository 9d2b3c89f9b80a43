"""Replay of a timeline through the caching allocator: what it books and holds over its steps."""

from __future__ import annotations

from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.record import Record
from napkinmath.base.units import round_up
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import highest
from napkinmath.memory.allocator import ReplayOutOfMemory
from napkinmath.memory.allocator_settings import UNLIMITED, AllocatorSettings
from napkinmath.memory.books import Books, in_turns
from napkinmath.memory.long_runs import followed, long_counts, num_events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.ir.ledger import StreamUse
    from napkinmath.ir.timeline import Timeline, TimelineSegment
    from napkinmath.memory.books import Peaks


class Replay(Record):
    """What a timeline costs in the allocator's books."""

    peak_allocated: int
    peak_reserved: int
    peak_unreturnable: int
    """Least reservation that would have done, had the cache been emptied all the time: what a full
    device comes down to."""
    end_allocated: int
    end_reserved: int
    inactive_split_bytes: int
    num_segments: int
    num_retries: int
    out_of_memory: str = ""
    """The failed request, if a limit was set and hit; the peaks are then those reached before."""
    bytes_missing: int = 0
    """By how much that request was above what the device could still give."""
    num_events: int = 0
    """Allocations, frees and renames that were played for these books."""
    is_followed: bool = False
    """Whether they were followed from shorter timelines: `bytes_missing` is then all that is."""

    def holding(self, nbytes: int) -> Replay:
        """The books where at least so many bytes are allocated at once."""
        names = ("peak_allocated", "peak_reserved", "peak_unreturnable")
        return self.replace(**{name: max(getattr(self, name), nbytes) for name in names})


FIGURES = (
    "peak_allocated",
    "peak_reserved",
    "peak_unreturnable",
    "end_allocated",
    "end_reserved",
    "inactive_split_bytes",
    "num_segments",
    "num_retries",
)
MANY = 1_000_000  # events of every block once: some 0.7 s of a 2.5 GHz core
SPELLED = 3072  # segments one by one; layers that take turns are rows where there are more


def _in_turns(order: Order[TimelineSegment]) -> Order[TimelineSegment]:
    """The order with layers that take turns as rows: whose segments book the same."""
    found: list[tuple[int, Sequence[TimelineSegment]]] = []
    for times, row in order.rows:
        if times == 1:
            found += [(often, part) for part, often in in_turns(row)]
        else:
            found.append((times, row))
    return Order(found)


def replay(timeline: Timeline, settings: AllocatorSettings | None = None) -> Replay:
    """Replays a timeline's events in order."""
    tensors = timeline.tensors
    sizes, uses = [t.nbytes for t in tensors], [t.use for t in tensors]
    return replayed(timeline.segments, sizes, settings, uses)


def replayed(
    order: Order[TimelineSegment],
    sizes: list[int],
    settings: AllocatorSettings | None = None,
    uses: list[StreamUse | None] | None = None,
) -> Replay:
    """The same of segments whose tensors have these bytes and streams; what comes too often to be
    played is followed from shorter timelines."""
    if sum(times == 1 for times, _ in order.counted()) > SPELLED:
        order = _in_turns(order)
    long, settings = long_counts(order, sizes), settings or AllocatorSettings()
    limit, free = settings.limit_bytes, settings.replace(limit_bytes=UNLIMITED)
    played = 0

    def play(shorter: Order[TimelineSegment], sizes: list[int]) -> tuple[dict[str, int], Peaks]:
        nonlocal played
        peaks: Peaks = {}
        found = _played(shorter, sizes, free, uses, peaks)
        played += found.num_events
        return {name: getattr(found, name) for name in FIGURES}, peaks

    figures: dict[str, Any] | None = None
    if long:
        figures = followed(order, long, sizes, lambda shorter: play(shorter, sizes)[0])
    elif not any(uses or ()) and num_events(order) > MANY:
        from napkinmath.memory.pools_apart import pools_apart

        figures = pools_apart(order, sizes, settings, play)
    if figures is None:
        return _played(order, sizes, settings, uses)
    found = Replay(**figures)
    # a line through two counts may fall short of what tensors take alone, by part of a segment
    least = highest(order, [round_up(size, ALLOCATION_GRANULE) for size in sizes])
    unused = max(found.end_reserved - found.end_allocated, 0)
    cached = min(max(found.inactive_split_bytes, 0), unused)
    found = found.replace(inactive_split_bytes=cached, num_events=played, is_followed=True).holding(
        max(found.peak_allocated, least)
    )
    return found if found.peak_reserved <= limit else _within(found, limit, max(sizes))


def _within(found: Replay, limit: int, largest: int) -> Replay:
    """A long timeline's books on a device that they fill: it returns what is cached, and fails where
    that is too little."""
    error = ReplayOutOfMemory(largest, min(found.peak_allocated, limit), limit, limit)
    fails = found.peak_unreturnable > limit
    return found.replace(
        peak_allocated=min(found.peak_allocated, limit),
        peak_reserved=limit,
        peak_unreturnable=min(found.peak_unreturnable, limit),
        end_reserved=min(found.end_reserved, limit),
        num_retries=1,
        out_of_memory=str(error) if fails else "",
        bytes_missing=found.peak_unreturnable - limit if fails else 0,
    )


def _played(
    order: Order[TimelineSegment],
    sizes: list[int],
    settings: AllocatorSettings | None,
    uses: list[StreamUse | None] | None = None,
    peaks: Peaks | None = None,
) -> Replay:
    books = Books(sizes, settings, uses)
    allocator, failed, missing = books.allocator, "", 0
    books.peaks = peaks
    try:
        books.play_on(order)
    except ReplayOutOfMemory as error:
        failed, missing = str(error), error.missing
    found = Replay(
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        peak_unreturnable=allocator.peak_unreturnable,
        end_allocated=allocator.allocated,
        end_reserved=allocator.reserved,
        inactive_split_bytes=allocator.inactive_split_bytes(),
        num_segments=len(allocator.segments),
        num_retries=allocator.num_retries,
        out_of_memory=failed,
        bytes_missing=missing,
        num_events=allocator.num_events,
    )
    for segment in allocator.segments.values():  # neighbours, which only a collection would free
        block, segment.last = segment.last, None
        while block is not None:
            block.before, block = None, block.before
    return found
