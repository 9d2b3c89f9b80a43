"""Replay of a timeline through the caching allocator: what it books and holds over its steps."""

from __future__ import annotations

from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.record import Record
from napkinmath.base.units import round_up
from napkinmath.ir.ledger import Phase
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import highest
from napkinmath.memory.allocator import CachingAllocator, ReplayOutOfMemory
from napkinmath.memory.allocator_settings import UNLIMITED, AllocatorSettings
from napkinmath.memory.long_runs import followed, in_a_row, long_counts
from napkinmath.memory.plain_books import PlainBooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from napkinmath.ir.ledger import StreamUse
    from napkinmath.ir.timeline import Timeline, TimelineSegment
    from napkinmath.memory.blocks import AllocatorBlock
    from napkinmath.memory.long_runs import Reach


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
_ON_DEVICE = (Phase.FORWARD, Phase.BACKWARD)
STEADY = 6  # repetitions of equal micro-steps after which the books are taken to repeat too
SPELLED = 3072  # segments one by one; layers that take turns are rows where there are more
LONG_ROW = 1024  # segments of a row that comes several times, above which it is taken apart itself
SETTLES = 6  # repetitions of a block in which a steady state is looked for


def repeated_rows(
    order: Order[TimelineSegment],
) -> Iterator[tuple[Sequence[TimelineSegment], int]]:
    """(row, how often it comes in a row): those of the order, and what repeats among the segments
    that it spells out."""
    spelled: list[TimelineSegment] = []
    for times, row in order.rows:
        if times == 1:
            spelled += row
            continue
        yield from rows(spelled)
        spelled = []
        yield row, times
    yield from rows(spelled)


def rows(
    segments: list[TimelineSegment], keys: Sequence[object] = ()
) -> Iterator[tuple[list[TimelineSegment], int]]:
    """(row of segments, how often it comes in a row), in order; what comes once comes alone. Those
    of one key are the same, without keys each is its own."""
    keys = keys or [id(segment) for segment in segments]
    after: dict[object, int] = {}  # where a segment comes next
    periods = [0] * len(segments)
    for at in range(len(segments) - 1, -1, -1):
        periods[at] = after.get(keys[at], at) - at
        after[keys[at]] = at
    at = 0
    while at < len(segments):
        period, times = periods[at] or 1, 1
        row, own = segments[at : at + period], keys[at : at + period]
        while periods[at] and keys[at + times * period : at + (times + 1) * period] == own:
            times += 1
        if times == 1:
            row = row[:1]
        at += times * len(row)
        yield row, times


def _in_turns(order: Order[TimelineSegment]) -> Order[TimelineSegment]:
    """The order with layers that take turns as rows: whose segments book the same."""
    found: list[tuple[int, Sequence[TimelineSegment]]] = []
    for times, row in order.rows:
        if times == 1:
            found += [(often, part) for part, often in in_turns(row)]
        else:
            found.append((times, row))
    return Order(found)


def in_turns(
    row: Sequence[TimelineSegment],
) -> Iterator[tuple[list[TimelineSegment], int]]:
    """(row of segments, how often another that books the same follows it) within a row."""
    keys = [(id(segment.events), segment.phase, segment.repeat) for segment in row]
    return rows(list(row), keys)


class Books:
    """An allocator under a timeline's events, and the blocks that each tensor has of it; `uses` are
    the streams of each, None where all compute."""

    def __init__(
        self,
        sizes: list[int],
        settings: AllocatorSettings | None,
        uses: list[StreamUse | None] | None = None,
    ) -> None:
        self.allocator, self.sizes = CachingAllocator(settings), sizes
        self.uses = uses if uses is not None and any(uses) else None
        self.held: list[list[AllocatorBlock]] = [[] for _ in sizes]
        self._booked: dict[int, list[tuple[str, int]]] = {}
        self._reaches: dict[int, Reach] = {}
        self._plain = PlainBooks(self.allocator, sizes, self.held)
        self._phase = Phase.LOAD

    def play(self, row: Iterable[TimelineSegment]) -> None:
        """Books the events of segments; tensors of no bytes take none. Raises OutOfMemory."""
        for segment in row:
            self._play(segment, self._left_when_settled(segment))
            if segment.empties:
                self.allocator.empty_cache()

    def _left_when_settled(self, segment: TimelineSegment) -> int:
        """Plays a block that leaves every tensor as many blocks as it found until the books are as
        they were after one of the two times before; gives how often it is still to be played.

        A layer's input and output change places, so two times make a round.
        """
        reach, states = self._reach(segment) if segment.repeat > 2 else {}, list[object]()
        if not reach or not _leaves_as_many(reach):
            return segment.repeat
        for played in range(1, min(segment.repeat, SETTLES) + 1):
            self._play(segment, 1)
            state = self.state(reach)
            if state in states[-2:]:
                return (segment.repeat - played) % (1 if state == states[-1] else 2)
            states.append(state)
        return segment.repeat - len(states)

    def _reach(self, segment: TimelineSegment) -> Reach:
        """How far one time through a segment's events goes into the blocks of its tensors."""
        key = id(segment.events)
        if key not in self._reaches:
            low, net = dict[int, int](), dict[int, int]()
            for action, index in self._booked_events(segment):
                old, new = (-1, index) if action == "+" else (index, -1)
                if action not in "+-":
                    old, new = segment.pairs[index]
                net[old] = less = net.get(old, 0) - 1
                low[old] = min(less, low.get(old, 0))
                net[new] = net.get(new, 0) + 1
            net.pop(-1, None)
            self._reaches[key] = {index: (low.get(index, 0), more) for index, more in net.items()}
        return self._reaches[key]

    def _play(self, segment: TimelineSegment, times: int) -> None:
        """Books the events of a segment so many times."""
        if self.uses is not None:
            return self._play_streams(segment, self.uses, times)
        held, allocator, pairs = self.held, self.allocator, segment.pairs
        events = self._booked_events(segment)
        if allocator.is_plain:
            self._plain.play(events, pairs, times)
            return
        allocator.num_events += len(events) * times
        for _ in range(times):
            for action, index in events:
                if action == "+":
                    held[index].append(allocator.malloc(self.sizes[index]))
                elif action == "-":
                    allocator.free(held[index].pop())
                else:
                    old, new = pairs[index]
                    held[new].append(held[old].pop())

    def _play_streams(
        self, segment: TimelineSegment, uses: list[StreamUse | None], times: int
    ) -> None:
        """The same with the streams of tensors. After a backward the loop reads the loss, and the
        update a norm: nothing waits any longer."""
        sizes, held, allocator = self.sizes, self.held, self.allocator
        phase, pairs, events = segment.phase, segment.pairs, self._booked_events(segment)
        allocator.num_events += len(events) * times
        if phase is not self._phase and (self._phase, phase) != _ON_DEVICE:
            allocator.waiting.done()
        self._phase = phase
        for _ in range(times):
            for action, index in events:
                if action == "+":
                    use = uses[index]
                    stream = 0 if use is None else use.stream
                    if use is not None and use.empties:
                        allocator.empty_cache()
                    held[index].append(allocator.malloc(sizes[index], stream))
                elif action == "-":
                    use = uses[index]
                    allocator.free(held[index].pop(), use)
                    if use is not None and use.empties:
                        allocator.empty_cache()
                else:
                    old, new = pairs[index]
                    held[new].append(held[old].pop())

    def _booked_events(self, segment: TimelineSegment) -> list[tuple[str, int]]:
        """The events of a segment that the allocator sees."""
        key, sizes, pairs = id(segment.events), self.sizes, segment.pairs
        events = self._booked.get(key)
        if events is None:
            events = self._booked[key] = [
                (action, index)
                for action, index in segment.events
                if (action in "+-" and sizes[index]) or (action == "=" and sizes[pairs[index][0]])
            ]
        return events

    def state(self, reach: Reach) -> object:
        """All that decides what follows, of the blocks that segments reach; the others stay as they
        are. Where old segments are collected, which goes by age, no two states are alike."""
        allocator, held = self.allocator, self.held
        if allocator.settings.garbage_collection_threshold:
            return object()
        return (
            allocator.layout(),
            allocator.reserved,
            allocator.num_retries,
            [
                (len(held[index]), [b.address for b in held[index][low:]] if low else ())
                for index, (low, _) in reach.items()
            ],
            allocator.waiting.addresses(),
        )

    def play_on(self, order: Order[TimelineSegment]) -> None:
        """Books segments in order; a row of segments that follows itself and leaves the books as it
        found them is through, however often it comes.

        One that leaves every tensor as many blocks as it found, elsewhere, is through after STEADY
        times.
        """
        for row, times in repeated_rows(order):
            self._through(row, times)

    def _through(self, row: Sequence[TimelineSegment], times: int) -> None:
        """Books a row so many times, or until it is through; one too long to be played segment by
        segment is gone through by the rows that come several times in it."""
        reach = in_a_row((one.repeat, self._reach(one)) for one in row) if times > 2 else {}
        looks = times > 2 and _leaves_as_many(reach)  # a second time costs less than a look
        moved = self._moved(reach) if times > STEADY else {}
        played = times if moved is None else min(times, STEADY)
        for _ in range(played):
            before = self.state(reach) if looks else None
            if len(row) > LONG_ROW:
                for part, often in in_turns(row):
                    self._through(part, often)
            else:
                self.play(row)
            if looks and before == self.state(reach):
                return
        for old, (new, count) in (moved or {}).items():
            for _ in range(count * (times - played)):
                self.held[new].append(self.held[old].pop())

    def _moved(self, reach: Reach) -> dict[int, tuple[int, int]] | None:
        """Tensors of which a row leaves fewer blocks than it found, each with one of as many bytes
        of which it leaves so many more; None where there is none such."""
        net = {index: more for index, (_, more) in reach.items()}
        gains = {(self.sizes[index], more): index for index, more in net.items() if more > 0}
        found: dict[int, tuple[int, int]] = {}
        for index, more in net.items():
            new = gains.pop((self.sizes[index], -more), None) if more < 0 else None
            if new is not None:
                found[index] = new, -more
            elif more < 0:
                return None
        return None if gains else found


def _leaves_as_many(reach: Reach) -> bool:
    return not any(more for _, more in reach.values())


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
    long = long_counts(order, sizes)
    if not long:
        return _played(order, sizes, settings, uses)
    settings = settings or AllocatorSettings()
    limit, free = settings.limit_bytes, settings.replace(limit_bytes=UNLIMITED)

    played = 0

    def figures(shorter: Order[TimelineSegment]) -> tuple[int, ...]:
        nonlocal played
        found = _played(shorter, sizes, free, uses)
        played += found.num_events
        return tuple(getattr(found, name) for name in FIGURES)

    found = Replay(**dict(zip(FIGURES, followed(order, long, sizes, figures), strict=True)))
    # a line through two counts may fall short of what tensors take alone, by part of a segment
    least = highest(order, [round_up(size, ALLOCATION_GRANULE) for size in sizes])
    unused = max(found.end_reserved - found.end_allocated, 0)
    cached = min(max(found.inactive_split_bytes, 0), unused)
    found = found.replace(inactive_split_bytes=cached, num_events=played).holding(
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
) -> Replay:
    books = Books(sizes, settings, uses)
    allocator, failed, missing = books.allocator, "", 0
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
