"""The curve of a step: its highest bytes over time (or over events where no time is known), and its
phases.

A column of any width shows the highest moment inside it, so that no thinning loses the peak.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import segment_profile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.timeline import Timeline, TimelineSegment


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
        (i for i in range(start, whole[1]) if timeline.segments[i].phase is Phase.SAVE), whole[1]
    )
    peaks = timeline.segment_peaks()
    best = max(point.nbytes for point in peaks)
    return (start, end) if any(point.nbytes == best for point in peaks[start:end]) else whole


def envelope(timeline: Timeline, num_columns: int) -> Envelope:
    """The steady step in columns; a repetition of a segment is the smallest unit of time here."""
    start, end = step_range(timeline)
    sizes = [t.requested for t in timeline.tensors]
    profiles = [segment_profile(segment, sizes) for segment in timeline.segments]
    live = sum(
        segment.repeat * net
        for segment, (_, _, net) in zip(timeline.segments[:start], profiles, strict=False)
    )
    shown = timeline.segments[start:end]
    in_seconds = any(segment.seconds for segment in shown)
    lengths = [segment.seconds if in_seconds else float(len(segment.events)) for segment in shown]
    extent = (
        sum(length * segment.repeat for segment, length in zip(shown, lengths, strict=True)) or 1.0
    )
    values, spans, x = [0] * num_columns, list[Span](), 0.0
    for segment, length, (high, _, net) in zip(shown, lengths, profiles[start:end], strict=True):
        top = live + high + max(0, (segment.repeat - 1) * net)
        _extend(spans, segment, x, x + length * segment.repeat, top)
        for _ in range(segment.repeat):
            first = min(int(x * num_columns / extent), num_columns - 1)
            last = min(int((x + length) * num_columns / extent), num_columns - 1)
            for column in range(first, last + 1):
                if live + high > values[column]:
                    values[column] = live + high
            live += net
            x += length
    return Envelope(values=tuple(values), spans=tuple(spans), extent=extent, in_seconds=in_seconds)


def _extend(
    spans: list[Span], segment: TimelineSegment, start: float, end: float, top: int
) -> None:
    if spans and spans[-1].phase is segment.phase:
        spans[-1] = spans[-1].replace(end=end, nbytes=max(spans[-1].nbytes, top))
    else:
        spans.append(Span(phase=segment.phase, start=start, end=end, nbytes=top))
