"""An allocator's books over the segments of a timeline: each block of each tensor, and what needs no
playing because it repeats."""

from __future__ import annotations

from napkinmath.ir.ledger import Phase
from napkinmath.memory.allocator import CachingAllocator
from napkinmath.memory.long_runs import in_a_row
from napkinmath.memory.plain_books import PlainBooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from napkinmath.ir.ledger import StreamUse
    from napkinmath.ir.order import Order
    from napkinmath.ir.timeline import TimelineSegment
    from napkinmath.memory.allocator_settings import AllocatorSettings
    from napkinmath.memory.blocks import AllocatorBlock
    from napkinmath.memory.long_runs import Reach

    Peaks = dict[int, tuple[int, int]]

_ON_DEVICE = (Phase.FORWARD, Phase.BACKWARD)
STEADY = 6  # repetitions of equal micro-steps after which the books are taken to repeat too
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
        self.peaks: Peaks | None = None
        """By list of events the most that could not be returned meanwhile, and the most that was
        booked; where asked for."""

    def play(self, row: Iterable[TimelineSegment]) -> None:
        """Books the events of segments; tensors of no bytes take none. Raises OutOfMemory."""
        for segment in row:
            if self.peaks is None:
                self._play(segment, self._left_when_settled(segment))
            else:
                self._play_noted(segment, self.peaks)
            if segment.empties:
                self.allocator.empty_cache()

    def _play_noted(self, segment: TimelineSegment, peaks: Peaks) -> None:
        """The same, and its own peaks."""
        allocator, key = self.allocator, id(segment.events)
        before = allocator.peak_unreturnable, allocator.peak_allocated
        allocator.peak_unreturnable, allocator.peak_allocated = 0, allocator.allocated
        allocator.note_unreturnable()
        self._play(segment, self._left_when_settled(segment))
        own = allocator.peak_unreturnable, allocator.peak_allocated
        allocator.peak_unreturnable = max(before[0], own[0])
        allocator.peak_allocated = max(before[1], own[1])
        known = peaks.get(key, (0, 0))
        peaks[key] = max(known[0], own[0]), max(known[1], own[1])

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
