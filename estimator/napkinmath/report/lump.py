"""Timelines of very many events made smaller: small tensors lumped by role, kernels joined, the
peak exact.

The lump of a role is drawn at the least that its tensors held between two redraws, so that no
moment shows more than there was and the highest moment stays the highest.
"""

from __future__ import annotations

from napkinmath.base.units import format_bytes
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Kernel, TensorInfo, Timeline, TimelineSegment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.timeline import Point

    Event = tuple[str, int]

LEAST_RISE = 0.002  # of the peak: a smaller rise of a lump is not drawn


def lumped(
    timeline: Timeline,
    segments: Sequence[int],
    counts: Sequence[int],
    peak: Point,
    most_events: int,
) -> Timeline:
    """These segments, repetitions spelled out, in about `most_events` events; `counts` is what is
    alive before them."""
    number = sum(len(timeline.segments[i].events) * timeline.segments[i].repeat for i in segments)
    lump = Lump(
        timeline,
        _threshold(timeline, segments, most_events // 3),
        max(2, 3 * number // most_events),
        int(LEAST_RISE * peak.nbytes),
    )
    made = [lump.opening(counts)]
    for index in segments:
        segment = timeline.segments[index]
        for repetition in range(segment.repeat):
            made.append(
                lump.rewrite(
                    segment,
                    peak.event if (index, repetition) == (peak.segment, peak.repetition) else -1,
                )
            )
    return Timeline(lump.tensors, made, timeline.stamp, (1,))


def _threshold(timeline: Timeline, segments: Sequence[int], most_events: int) -> int:
    """The size below which tensors are lumped, so that no more than `most_events` events of larger
    ones are left."""
    numbers: dict[int, int] = {}
    for index in segments:
        segment = timeline.segments[index]
        for action, tensor in segment.events:
            if action in "+-":
                size = timeline.tensors[tensor].requested
                numbers[size] = numbers.get(size, 0) + segment.repeat
    left = 0
    for size in sorted(numbers, reverse=True):
        left += numbers[size]
        if left > most_events:
            return size + 1
    return 0


class Lump:
    """Rewrites segments; keeps what the small tensors of each role hold, and what is drawn for
    them."""

    def __init__(self, timeline: Timeline, threshold: int, stride: int, least_rise: int) -> None:
        self.tensors: list[TensorInfo] = list(timeline.tensors)
        self._small = [t.requested < threshold for t in timeline.tensors]
        self._threshold, self._stride, self._least_rise = threshold, stride, least_rise
        self._held: dict[Role, int] = {}
        self._least: dict[Role, int] = {}  # since the last redraw
        self._drawn: dict[Role, int] = {}  # role -> index of the tensor that stands for its lump
        self._events: list[Event] = []
        self._pending: list[Event] = []  # large tensors and kernels since the last redraw

    def opening(self, counts: Sequence[int]) -> TimelineSegment:
        """A segment that allocates what is alive before the first one."""
        self._events = []
        for tensor, count in enumerate(counts):
            if self._small[tensor]:
                self._hold(tensor, count)
            else:
                self._events += [("+", tensor)] * count
        self._redraw(self._held, exact=True)
        return TimelineSegment("before the step", Phase.LOAD, 1, self._events, [])

    def rewrite(self, segment: TimelineSegment, peak_event: int) -> TimelineSegment:
        """One repetition with its lumps redrawn every few events, and exactly at the peak."""
        self._events, self._pending, self._least = [], [], dict(self._held)
        kernels: list[Kernel] = []
        pairs: list[tuple[int, int]] = []
        joined = 0
        for position, (action, index) in enumerate(segment.events):
            if position == peak_event:
                self._flush(self._least)
            if action == "!":
                joined = (joined + 1) % self._stride if kernels else 0
                if joined:
                    kernels[-1] = _joined(kernels[-1], segment.kernels[index])
                else:
                    self._pending.append(("!", len(kernels)))
                    kernels.append(segment.kernels[index])
            elif action == "=":
                self._hand_on(*segment.pairs[index], pairs)
            else:
                self._count(index, 1 if action == "+" else -1)
            if position == peak_event:
                self._flush(self._held, exact=True)
            elif position % self._stride == self._stride - 1:
                self._flush(self._least)
        self._flush(self._least)
        return TimelineSegment(
            segment.name, segment.phase, 1, self._events, pairs, kernels, segment.seconds
        )

    def _hand_on(self, old: int, new: int, pairs: list[tuple[int, int]]) -> None:
        if self._small[old] or self._small[new]:
            self._count(old, -1)
            self._count(new, 1)
        else:
            self._pending.append(("=", len(pairs)))
            pairs.append((old, new))

    def _count(self, tensor: int, count: int) -> None:
        if self._small[tensor]:
            self._hold(tensor, count)
        else:
            self._pending.append(("+" if count > 0 else "-", tensor))

    def _hold(self, tensor: int, count: int) -> None:
        info = self.tensors[tensor]
        held = self._held.get(info.role, 0) + count * info.requested
        self._held[info.role] = held
        self._least[info.role] = min(self._least.get(info.role, 0), held)

    def _flush(self, levels: dict[Role, int], *, exact: bool = False) -> None:
        self._redraw(levels, exact=exact)
        self._events += self._pending
        self._pending, self._least = [], dict(self._held)

    def _redraw(self, levels: dict[Role, int], *, exact: bool = False) -> None:
        for role, level in levels.items():
            old = self._drawn.get(role)
            had = self.tensors[old].requested if old is not None else 0
            if level == had or (not exact and had < level <= had + self._least_rise):
                continue
            if old is not None:
                self._events.append(("-", self._drawn.pop(role)))
            if level:
                self._drawn[role] = len(self.tensors)
                self._events.append(("+", len(self.tensors)))
                self.tensors.append(
                    TensorInfo(
                        f"tensors below {format_bytes(self._threshold)} together",
                        role,
                        "",
                        level,
                        level,
                    )
                )


def _joined(first: Kernel, second: Kernel) -> Kernel:
    name = first.name if first.name.endswith(" and others") else f"{first.name} and others"
    return Kernel(
        name,
        first.module,
        first.seconds + second.seconds,
        first.flops + second.flops,
        first.moved + second.moved,
        first.bound,
        first.launches + second.launches,
        between_nodes=first.between_nodes,
        by_autograd=first.by_autograd,
    )
