"""Timelines that repeat something very often, for drawing: the first and the last time as they are,
those between in a few steps that hold what they hold together."""

from __future__ import annotations

from napkinmath.ir.ledger import Role
from napkinmath.ir.timeline import Kernel, TensorInfo, Timeline, TimelineSegment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_TURNS = 3  # of a row that are all drawn
MOST_COPIES = 512  # of a block
STEPS = 64  # of the copies between


def without_middles(timeline: Timeline, start: int, end: int) -> tuple[Timeline, int]:
    """(the run up to a segment and the segments up to another, middles of long repetitions left
    out; how many times of a row were). Copies of a block keep their time, turns of a row do not."""
    gaps = _Gaps(timeline)
    left_out = 0
    made: list[TimelineSegment] = []
    for times, row in timeline.segments[start:end].rows:
        drawn = [part for segment in row for part in gaps.copies(segment)]
        if times <= MOST_TURNS:
            made += drawn * times
            continue
        left_out = max(left_out, times - 2)
        made += [*drawn, *gaps.between(row, times - 2, 1, timed=False), *drawn]
    before = timeline.segments[:start].rows
    order = type(timeline.segments)([*before, (1, made)])
    return Timeline(gaps.tensors, order, timeline.stamp, (start,)), left_out


class _Gaps:
    """Makes the segments that stand for what is left out; `tensors` are the timeline's and theirs."""

    def __init__(self, timeline: Timeline) -> None:
        self.tensors = list(timeline.tensors)
        self._known: dict[tuple[Role, int], int] = {}

    def copies(self, segment: TimelineSegment) -> list[TimelineSegment]:
        """A segment, of many copies the first, those between, and the last."""
        if segment.repeat <= MOST_COPIES:
            return [segment]
        one = segment.copy(repeat=1)
        between = self.between([one], segment.repeat - 2, STEPS, timed=True)
        return [one, *between, one]

    def between(
        self, row: Sequence[TimelineSegment], times: int, steps: int, *, timed: bool
    ) -> list[TimelineSegment]:
        """A row that comes so many times, in some equal steps and one for the rest."""
        each, rest = divmod(times, steps)
        parts = ((steps, each), (1, rest))
        return [self._step(row, n, many, timed=timed) for many, n in parts if n]

    def _step(
        self, row: Sequence[TimelineSegment], times: int, repeat: int, *, timed: bool
    ) -> TimelineSegment:
        seconds = times * sum(s.repeat * s.seconds for s in row) if timed else 0.0
        name = f"{times} more of {row[0].name}"
        events = [
            ("+" if change > 0 else "-", self._tensor(role, abs(change) * times))
            for role, change in self._net(row).items()
            if change
        ]
        kernels = [Kernel(name, "", seconds, 0, 0, "", 0)] if seconds else []
        events += [("!", 0)] * len(kernels)
        return TimelineSegment(name, row[0].phase, repeat, events, [], kernels, seconds)

    def _net(self, row: Sequence[TimelineSegment]) -> dict[Role, int]:
        """The bytes of each role that a row adds or takes."""
        found: dict[Role, int] = {}
        for segment in row:
            for action, index in segment.events:
                if action == "!":
                    continue
                old, new = segment.pairs[index] if action == "=" else (index, index)
                for tensor, sign, where in ((old, -1, "-="), (new, 1, "+=")):
                    if action in where:
                        info = self.tensors[tensor]
                        moved = sign * segment.repeat * info.requested
                        found[info.role] = found.get(info.role, 0) + moved
        return found

    def _tensor(self, role: Role, nbytes: int) -> int:
        """The tensor that stands for so many bytes of a role."""
        found = self._known.get((role, nbytes))
        if found is None:
            found = self._known[role, nbytes] = len(self.tensors)
            self.tensors.append(TensorInfo("tensors left out", role, "", nbytes, nbytes))
        return found
