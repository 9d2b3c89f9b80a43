"""The curve of a step: its highest bytes over time (or over events where no time is known), and its
phases.

A column of any width shows the highest moment inside it, so that no thinning loses the peak.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import levels_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.timeline import Level, Timeline, TimelineSegment


class Span(Record):
    """A phase on the horizontal axis, and its highest bytes."""

    phase: Phase
    start: float
    end: float
    nbytes: int


class Envelope(Record):
    """The highest bytes in each of `values`' columns over `extent` seconds or events, and the
    phases in order."""

    values: tuple[int, ...]
    spans: tuple[Span, ...]
    extent: float
    in_seconds: bool


def step_range(timeline: Timeline) -> tuple[int, int]:
    """First and end segment of the steady step, saving left out; the whole run where only another
    moment reaches the peak or no step is marked."""
    whole = 0, len(timeline.segments)
    if not timeline.step_starts:
        return whole
    start = timeline.step_starts[-1]
    end = next(
        (
            at + row.index(segment)
            for at, _, row in timeline.segments.placed()
            for segment in row
            if at >= start and segment.phase is Phase.SAVE
        ),
        whole[1],
    )
    peaks = timeline.segment_peaks()
    best = max(point.nbytes for point in peaks)
    reached = any(point.nbytes == best for point in peaks if start <= point.segment < end)
    return (start, end) if reached else whole


def envelope(timeline: Timeline, num_columns: int) -> Envelope:
    """The steady step in columns; a repetition of a segment is the smallest unit of time here. Of
    more repetitions than columns, neighbours are drawn as one."""
    start, end = step_range(timeline)
    order = timeline.segments[start:end]
    in_seconds = any(segment.seconds for _, segment in order.counted())
    lengths = {
        id(segment): segment.seconds if in_seconds else float(len(segment.events))
        for _, segment in order.counted()
    }
    extent = sum(
        times * lengths[id(segment)] * segment.repeat for times, segment in order.counted()
    )
    drawn = _Drawn(lengths, num_columns, extent or 1.0)
    sizes = [t.requested for t in timeline.tensors]
    before = levels_of(timeline.segments[:start], sizes)
    drawn.live = sum(
        times * grows
        for (times, _), (_, grows, _) in zip(timeline.segments[:start].rows, before, strict=True)
    )
    for (times, row), level in zip(order.rows, levels_of(order, sizes), strict=True):
        drawn.add_row(times, row, level)
    return Envelope(
        values=tuple(drawn.values),
        spans=tuple(
            Span(phase=x.phase, start=x.start, end=x.end, nbytes=x.nbytes) for x in drawn.phases
        ),
        extent=drawn.extent,
        in_seconds=in_seconds,
    )


class _Phase:
    """A span that may still grow."""

    __slots__ = ("end", "nbytes", "phase", "start")

    def __init__(self, phase: Phase, start: float, end: float, nbytes: int) -> None:
        self.phase, self.start, self.end, self.nbytes = phase, start, end, nbytes


class _Drawn:
    """The columns and phases so far: `x` is where the next segment begins, `live` its bytes."""

    def __init__(self, lengths: dict[int, float], num_columns: int, extent: float) -> None:
        self.lengths, self.extent = lengths, extent
        self.values, self.phases = [0] * num_columns, list[_Phase]()
        self.x, self.live = 0.0, 0

    def add_row(self, times: int, row: Sequence[TimelineSegment], level: Level) -> None:
        """A row of segments; where its times are drawn together its phases are too, each as long as
        it takes in all."""
        _, grows, starts = level
        if times <= len(self.values):
            for _ in range(times):
                for segment, (_, profile) in zip(row, starts, strict=True):
                    self._span(segment, segment.repeat, profile, 0)
                    self._paint(self.lengths[id(segment)], segment.repeat, profile[0], profile[2])
            return
        begun, x = self.live, self.x
        for segment, (start, profile) in zip(row, starts, strict=True):
            self.live = begun + start
            self._span(segment, times * segment.repeat, profile, max(0, (times - 1) * grows))
            self.x += times * segment.repeat * self.lengths[id(segment)]
        self.live, self.x = begun, x
        high = max(
            start + profile[0] + max(0, (segment.repeat - 1) * profile[2])
            for segment, (start, profile) in zip(row, starts, strict=True)
        )
        length = sum(segment.repeat * self.lengths[id(segment)] for segment in row)
        self._paint(length, times, high, grows)

    def _paint(self, length: float, times: int, high: int, net: int) -> None:
        """`times` repetitions of some length, each `high` bytes at most and `net` above the one
        before."""
        together = -(-times // (4 * len(self.values)))
        begun, left, last_column = self.live, times, len(self.values) - 1
        while left:
            count = min(together, left)
            top = self.live + high + max(0, (count - 1) * net)
            first = min(int(self.x * len(self.values) / self.extent), last_column)
            last = min(int((self.x + count * length) * len(self.values) / self.extent), last_column)
            for column in range(first, last + 1):
                self.values[column] = max(self.values[column], top)
            self.live += count * net
            self.x += count * length
            left -= count
        self.live = begun + times * net

    def _span(
        self, segment: TimelineSegment, repeat: int, profile: tuple[int, int, int], more: int
    ) -> None:
        top = self.live + profile[0] + max(0, (segment.repeat - 1) * profile[2]) + more
        end = self.x + self.lengths[id(segment)] * repeat
        last = self.phases[-1] if self.phases else None
        if last is not None and last.phase is segment.phase:
            last.end, last.nbytes = end, max(last.nbytes, top)
        else:
            self.phases.append(_Phase(segment.phase, self.x, end, top))
