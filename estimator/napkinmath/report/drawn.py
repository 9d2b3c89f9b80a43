"""What of a timeline is drawn: the steady step in columns by role, thinned so that the peak stays
exact.

A column shows the highest moment inside it. Of very many equal micro-steps the first and the last
are kept, and so are those of very many layers. Of very many events, small tensors are lumped together at no more than what they really
held, so that nothing drawn exceeds what was there.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.ledger import Role
from napkinmath.ir.timeline import Point, Timeline, TimelineSegment
from napkinmath.report.curve import Span, step_range
from napkinmath.report.left_out import without_middles
from napkinmath.report.lump import lumped
from napkinmath.report.palette import STACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_EVENTS = 300_000


class Shown(Record):
    """The segments that are drawn, copies alive before them, and how many micro-steps were left
    out."""

    timeline: Timeline
    segments: tuple[int, ...]
    counts: tuple[int, ...]
    left_out: int

    @property
    def peak(self) -> Point:
        """The highest point among the segments drawn."""
        return max(self.timeline.segment_peaks(self.segments), key=lambda point: point.nbytes)


def shown(timeline: Timeline, *, most_events: int = MOST_EVENTS) -> Shown:
    """The steady step, or the whole run where the peak lies outside it; thinned above
    `most_events`."""
    found = _kept_segments(timeline, most_events)
    if num_events(found.timeline, found.segments) > most_events:
        found = _kept_segments(
            lumped(found.timeline, found.segments, found.counts, found.peak, most_events), 1 << 62
        ).replace(left_out=found.left_out)
    return found


def num_events(timeline: Timeline, segments: Sequence[int]) -> int:
    """Events of these segments, repetitions spelled out."""
    return sum(len(timeline.segments[i].events) * timeline.segments[i].repeat for i in segments)


def _kept_segments(timeline: Timeline, most_events: int) -> Shown:
    start, end = step_range(timeline)
    left_out, counts = 0, _counts_before(timeline, start)
    events = sum(
        times * len(segment.events) * segment.repeat
        for times, segment in timeline.segments[start:end].counted()
    )
    if events > most_events:
        timeline, left_out = without_middles(timeline, start, end)
        counts += [0] * (len(timeline.tensors) - len(counts))
        end = len(timeline.segments)
    return Shown(
        timeline=timeline,
        segments=tuple(range(start, end)),
        counts=tuple(counts),
        left_out=left_out,
    )


def _counts_before(timeline: Timeline, start: int) -> list[int]:
    """Copies of each tensor alive when a segment starts."""
    if start == 0:
        return [0] * len(timeline.tensors)
    last = timeline.segments[start - 1]
    return timeline.live_counts(
        Point(segment=start - 1, repetition=last.repeat - 1, event=len(last.events) - 1, nbytes=0)
    )


# ---------------------------------------------------------------- columns


class Columns(Record):
    """Bytes of each role in each column, phases, and the peak's column."""

    number: int
    roles: tuple[Role, ...]
    heights: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    extent: float
    in_seconds: bool
    peak_x: float
    peak_column: int

    @property
    def totals(self) -> tuple[int, ...]:
        """The height of each column."""
        return (
            tuple(map(sum, zip(*self.heights, strict=True))) if self.heights else (0,) * self.number
        )


def event_lengths(segment: TimelineSegment, in_seconds: bool) -> list[float]:
    """How far each event of a segment moves along the axis: a kernel by its seconds; evenly where
    only the segment's are known."""
    number = len(segment.events)
    if not in_seconds:
        return [1.0] * number
    if not any(kernel.seconds for kernel in segment.kernels):
        return [segment.seconds / number] * number if number else []
    return [
        segment.kernels[index].seconds if action == "!" else 0.0 for action, index in segment.events
    ]


def has_seconds(found: Shown) -> bool:
    """Whether any segment drawn takes time."""
    return any(found.timeline.segments[index].seconds for index in found.segments)


def steps(
    found: Shown, in_seconds: bool
) -> Iterator[tuple[TimelineSegment, str, int, float, float]]:
    """(segment, action, index, x before, x after) of every event drawn, repetitions spelled out."""
    x = 0.0
    segments = found.timeline.segments
    lengths = {id(segments[i]): event_lengths(segments[i], in_seconds) for i in found.segments}
    for number in found.segments:
        segment = segments[number]
        own = lengths[id(segment)]
        for _ in range(segment.repeat):
            for (action, index), length in zip(segment.events, own, strict=True):
                yield segment, action, index, x, x + length
                x += length


def columns(found: Shown, number: int) -> Columns:
    """The stacked columns of what is shown."""
    timeline, in_seconds = found.timeline, has_seconds(found)
    order = {role: place for place, role in enumerate(STACK)}
    places = [order[t.role] for t in timeline.tensors]
    sizes = [t.requested for t in timeline.tensors]
    level = [0] * len(STACK)
    for place, size, count in zip(places, sizes, found.counts, strict=True):
        level[place] += size * count
    segments = timeline.segments
    extent = (
        sum(
            sum(event_lengths(segments[i], in_seconds)) * segments[i].repeat for i in found.segments
        )
        or 1.0
    )
    total, column = sum(level), 0
    best, kept = [-1] * number, [level] * number
    best[0], kept[0] = total, list(level)
    peak, peak_x = total, 0.0
    for segment, action, index, before, after in steps(found, in_seconds):
        if action == "+":
            level[places[index]] += sizes[index]
            total += sizes[index]
            if total > best[column]:
                best[column], kept[column] = total, list(level)
            if total > peak:
                peak, peak_x = total, before
        elif action == "-":
            level[places[index]] -= sizes[index]
            total -= sizes[index]
        elif action == "=":
            old, new = segment.pairs[index]
            level[places[old]] -= sizes[old]
            level[places[new]] += sizes[new]
            total += sizes[new] - sizes[old]
        end = min(int(after * number / extent), number - 1)
        while column < end:
            column += 1
            best[column], kept[column] = total, list(level)
    present = [place for place in range(len(STACK)) if any(column[place] for column in kept)]
    return Columns(
        number=number,
        roles=tuple(STACK[place] for place in present),
        heights=tuple(tuple(column[place] for column in kept) for place in present),
        spans=tuple(_spans(found, in_seconds)),
        extent=extent,
        in_seconds=in_seconds,
        peak_x=peak_x,
        peak_column=min(int(peak_x * number / extent), number - 1),
    )


def _spans(found: Shown, in_seconds: bool) -> Iterator[Span]:
    peaks = found.timeline.segment_peaks(found.segments)
    current: Span | None = None
    x = 0.0
    for index, peak in zip(found.segments, peaks, strict=True):
        segment = found.timeline.segments[index]
        end = x + sum(event_lengths(segment, in_seconds)) * segment.repeat
        top = peak.nbytes
        if current is not None and current.phase is segment.phase:
            current = current.replace(end=end, nbytes=max(current.nbytes, top))
        else:
            if current is not None:
                yield current
            current = Span(phase=segment.phase, start=x, end=end, nbytes=top)
        x = end
    if current is not None:
        yield current
