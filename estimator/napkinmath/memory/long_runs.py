"""Timelines that repeat something very often: the same with fewer repetitions, and what follows
from those.

What grows with a repetition grows by the same amount each time, but for how blocks fall into
segments: a figure of the books lies on a line over the count, to within a segment. So two shorter
timelines are replayed, some hundred layers or some dozen micro-batches apart, and the line is
followed up to the count that is asked for. Counts that differ by a few (first copies have segments
of their own) are shortened by the same number, so that what one makes the other finds.
"""

from __future__ import annotations

from itertools import product

from napkinmath.ir.ledger import Phase
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import TimelineSegment, segment_profile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Reach = dict[int, tuple[int, int]]
    # of each tensor the fewest copies that are alive, and those at the end, less those at first

COPIES = 256  # of a block between two shorter timelines; up to twice as many are all played
TURNS = 32  # of a growing row, such as the forwards of a pipeline's micro-batches
_NEAR = 8  # counts that differ by no more stand for the same layers, or the same micro-batches


class LongCount:
    """Counts from `low` to `high` of copies (or of turns of a row), which may be lessened by `most`
    steps of `step`."""

    __slots__ = ("high", "low", "most", "of_rows", "step")

    def __init__(self, low: int, high: int, step: int, *, of_rows: bool) -> None:
        self.low, self.high, self.step, self.of_rows = low, high, step, of_rows
        self.most = (low - step) // step

    def lessened(self, count: int, *, of_rows: bool, steps: int) -> int:
        """A count with the steps left that are asked for."""
        if of_rows is not self.of_rows or not self.low <= count <= self.high:
            return count
        return count - (self.most - steps) * self.step


def long_counts(order: Order[TimelineSegment], sizes: list[int]) -> list[LongCount]:
    """The counts of a timeline that are too long to be played; none of an ordinary one."""
    copies = {s.repeat for _, s in order.counted() if s.repeat > 2 * COPIES}
    turns = {  # weights are loaded once, which is soon played
        times
        for times, row in order.rows
        if times > 2 * TURNS and row[0].phase is not Phase.LOAD and _grows(row, sizes)
    }
    found = [
        *(LongCount(low, high, COPIES, of_rows=False) for low, high in _neighbours(copies)),
        *(LongCount(low, high, TURNS, of_rows=True) for low, high in _neighbours(turns)),
    ]
    return found if not turns or _agree(order, found, sizes) else []


def num_events(order: Order[TimelineSegment]) -> int:
    """Events of every block once, with its repetitions: what comes again is soon as it was."""
    blocks = {id(one.events): one for _, one in order.counted()}.values()
    return sum(one.repeat * len(one.events) for one in blocks)


def busiest_count(order: Order[TimelineSegment], sizes: list[int], step: int) -> LongCount | None:
    """The count of copies with most events, where it is long enough to be lessened by steps of
    `step`."""
    events: dict[int, int] = {}
    for segment in {id(one.events): one for _, one in order.counted()}.values():
        if segment.repeat > 2 * step:
            copies = segment.repeat * len(segment.events)
            events[segment.repeat] = events.get(segment.repeat, 0) + copies
    found = [
        (sum(number for count, number in events.items() if low <= count <= high), low, high)
        for low, high in _neighbours(set(events))
    ]
    if not found:
        return None
    _, low, high = max(found)
    count = LongCount(low, high, step, of_rows=False)
    return count if _agree(order, [count], sizes) else None


def _agree(order: Order[TimelineSegment], long: list[LongCount], sizes: list[int]) -> bool:
    """Whether what is allocated of a tensor is lessened as what frees it."""
    whole, less = _balance(order), _balance(lessened(order, long, (0,) * len(long), sizes))
    return all(low >= 0 and bool(net) == bool(whole[i][1]) for i, (low, net) in less.items())


def _balance(order: Order[TimelineSegment]) -> Reach:
    # of each tensor the fewest copies that are alive, and those at the end, less those at first
    known: dict[int, Reach] = {}

    def of(segment: TimelineSegment) -> Reach:
        key = id(segment.events)
        if key not in known:
            moves: list[tuple[int, Reach]] = []
            for action, index in segment.events:
                freed, made = (index, -1) if action == "-" else (-1, index)
                if action not in "+-":
                    freed, made = segment.pairs[index] if action == "=" else (-1, -1)
                moves += [(1, {freed: (-1, -1)}), (1, {made: (0, 1)})]
            known[key] = in_a_row(moves)
            known[key].pop(-1, None)
        return known[key]

    return in_a_row(
        (times, in_a_row((segment.repeat, of(segment)) for segment in row))
        for times, row in order.rows
    )


def in_a_row(
    parts: Iterable[tuple[int, Reach]],
) -> Reach:
    """(fewest, at the end) of each tensor over parts that come so many times each."""
    lows, nets = dict[int, int](), dict[int, int]()
    for times, part in parts:
        for index, (low, net) in part.items():
            now = nets.get(index, 0)
            lowest = now + low if net >= 0 else now + low + net * (times - 1)
            if lowest < lows.get(index, 0):
                lows[index] = lowest
            nets[index] = now + net * times
    return {index: (lows.get(index, 0), now) for index, now in nets.items()}


def _grows(row: Iterable[TimelineSegment], sizes: list[int]) -> bool:
    return sum(segment.repeat * segment_profile(segment, sizes)[2] for segment in row) != 0


def _neighbours(counts: set[int]) -> Iterator[tuple[int, int]]:
    """(least, greatest) of counts that lie close together."""
    waiting = sorted(counts)
    while waiting:
        low = high = waiting.pop(0)
        while waiting and waiting[0] - high <= _NEAR:
            high = waiting.pop(0)
        yield low, high


def followed(
    order: Order[TimelineSegment],
    long: list[LongCount],
    sizes: list[int],
    figures: Callable[[Order[TimelineSegment]], dict[str, int]],
) -> dict[str, int]:
    """The figures of the whole timeline, from those of timelines in which every long count is as
    short as it may be, or by one step longer."""
    found: dict[str, int] = {}
    for steps in product((0, 1), repeat=len(long)):
        share = 1
        for count, taken in zip(long, steps, strict=True):
            share *= count.most if taken else 1 - count.most
        values = figures(lessened(order, long, steps, sizes))
        found = {name: found.get(name, 0) + share * value for name, value in values.items()}
    return found


def lessened(
    order: Order[TimelineSegment],
    long: list[LongCount],
    steps: tuple[int, ...],
    sizes: list[int],
) -> Order[TimelineSegment]:
    """The timeline with its long counts lessened, to the least (0) or by one step less (1)."""
    known: dict[int, TimelineSegment] = {}

    def less(count: int, *, of_rows: bool) -> int:
        for found, left in zip(long, steps, strict=True):
            count = found.lessened(count, of_rows=of_rows, steps=left)
        return count

    def shorter(segment: TimelineSegment) -> TimelineSegment:
        if id(segment) not in known:
            repeat = less(segment.repeat, of_rows=False)
            known[id(segment)] = (
                segment if repeat == segment.repeat else segment.copy(repeat=repeat)
            )
        return known[id(segment)]

    return Order(
        (
            less(times, of_rows=True) if _grows(row, sizes) else times,
            [shorter(segment) for segment in row],
        )
        for times, row in order.rows
    )
