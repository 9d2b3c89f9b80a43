"""Timeline: bytes and seconds over a training run, the one type for analytic, traced and measured
steps.

A timeline is a table of tensors and a list of segments; a segment repeats its events `repeat` times
(a layer's forward), so the analytic path stays small, and `events()` spells everything out for
plots, the allocator replay and comparisons. Peaks and breakdowns are read off the segments: within
a repeated segment the live bytes are linear in the repetition.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.ledger import ALLOC, Phase, Role
from napkinmath.ir.order import Order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from napkinmath.base.expr import Bindings
    from napkinmath.ir.ledger import StreamUse

    # live bytes before a row, its net change, and of each segment the bytes since the row's start
    # with its profile
    Level = tuple[int, int, list[tuple[int, tuple[int, int, int]]]]


class TensorInfo:
    """A row of the tensor table: `requested` is `nbytes` rounded up to 512 B. `host_bytes` is what
    it takes of the host's memory, or of unified memory if `managed`; `bindings` are those under which
    `axes` give its bytes, None where no axes are known; `use` says on which stream it is made."""

    __slots__ = (
        "axes",
        "bindings",
        "dtype",
        "host_bytes",
        "managed",
        "module",
        "name",
        "nbytes",
        "requested",
        "role",
        "source",
        "use",
    )

    def __init__(
        self,
        name: str,
        role: Role,
        module: str,
        nbytes: int,
        requested: int,
        dtype: str = "",
        axes: object = (),
        source: str = "",
        host_bytes: int = 0,
        managed: bool = False,
        bindings: Bindings | None = None,
        use: StreamUse | None = None,
    ) -> None:
        self.host_bytes, self.managed, self.bindings = host_bytes, managed, bindings
        self.use = use
        (
            self.name,
            self.role,
            self.module,
            self.nbytes,
            self.requested,
            self.dtype,
            self.axes,
            self.source,
        ) = (
            name,
            role,
            module,
            nbytes,
            requested,
            dtype,
            axes,
            source,
        )


class TimelineSegment:
    """`repeat` times the same events. An event is (action, tensor index, seconds):

    '+' allocates and '-' frees a tensor, '!' runs kernels for some seconds (index is into
    `kernels`), '=' hands the block of the second tensor on to the first (index is the pair's).
    `empties`: the allocator's cache is emptied after the last of them.
    """

    __slots__ = ("empties", "events", "kernels", "name", "pairs", "phase", "repeat", "seconds")

    def __init__(
        self,
        name: str,
        phase: Phase,
        repeat: int,
        events: list[tuple[str, int]],
        pairs: list[tuple[int, int]],
        kernels: list[Kernel] | None = None,
        seconds: float = 0.0,
        *,
        empties: bool = False,
    ) -> None:
        self.empties = empties
        self.name, self.phase, self.repeat, self.events, self.pairs = (
            name,
            phase,
            repeat,
            events,
            pairs,
        )
        self.kernels: list[Kernel] = kernels or []
        self.seconds = seconds  # of one repetition

    def copy(
        self, *, repeat: int, name: str | None = None, phase: Phase | None = None
    ) -> TimelineSegment:
        """The same segment, repeated otherwise, or under another name."""
        return TimelineSegment(
            self.name if name is None else name,
            self.phase if phase is None else phase,
            repeat,
            self.events,
            self.pairs,
            self.kernels,
            self.seconds,
            empties=self.empties,
        )


class Kernel:
    """Work of one operation: seconds, and what bounds it."""

    __slots__ = (
        "between_nodes",
        "bound",
        "by_autograd",
        "flops",
        "launches",
        "module",
        "moved",
        "name",
        "seconds",
        "waits",
    )

    def __init__(
        self,
        name: str,
        module: str,
        seconds: float,
        flops: int,
        moved: int,
        bound: str,
        launches: int = 1,
        *,
        waits: bool = False,
        between_nodes: bool = False,
        by_autograd: bool = False,
    ) -> None:
        self.by_autograd = by_autograd  # its engine issues it, not the model's Python
        self.waits = waits  # the host reads a result of it: nothing is queued behind
        self.between_nodes = between_nodes  # a collective over the network, not the GPUs' own links
        self.name, self.module, self.seconds, self.flops, self.moved, self.bound, self.launches = (
            name,
            module,
            seconds,
            flops,
            moved,
            bound,
            launches,
        )

    def times(self, count: int) -> Kernel:
        """The same kernel so often."""
        return Kernel(
            self.name,
            self.module,
            self.seconds * count,
            self.flops * count,
            self.moved * count,
            self.bound,
            self.launches * count,
            waits=self.waits,
            by_autograd=self.by_autograd,
        )


class Point(Record):
    """A moment of the timeline: after event `event` of repetition `repetition` of segment
    `segment`."""

    segment: int
    repetition: int
    event: int
    nbytes: int


class Stamp(Record):
    """Where a timeline comes from: 'analytic', 'traced' or 'measured', with library versions and
    device."""

    origin: str
    details: tuple[tuple[str, str], ...] = ()


class Timeline:
    """Tensors, segments in their order, and their stamp; see the module docstring."""

    __slots__ = ("segments", "stamp", "step_starts", "tensors")

    def __init__(
        self,
        tensors: list[TensorInfo],
        segments: Sequence[TimelineSegment] | Order[TimelineSegment],
        stamp: Stamp,
        step_starts: tuple[int, ...] = (),
    ) -> None:
        self.tensors, self.stamp = tensors, stamp
        self.segments = segments if isinstance(segments, Order) else Order([(1, segments)])
        self.step_starts = step_starts  # index of the first segment of each training step

    # ------------------------------------------------------------ bytes

    def segment_peaks(self, indices: Iterable[int] | None = None) -> list[Point]:
        """The highest requested bytes of the segments of these indices, in order; without any, of
        every segment's first and last time in its row, which the highest of all is among."""
        levels = levels_of(self.segments, [t.requested for t in self.tensors])
        found: list[Point] = []
        for index in self._first_and_last() if indices is None else indices:
            row, time, position = self.segments.place(index)
            base, grows, starts = levels[row]
            start, (high, at, delta) = starts[position]
            last = self.segments.rows[row][1][position].repeat - 1 if delta > 0 else 0
            nbytes = base + time * grows + start + last * delta + high
            found.append(Point(segment=index, repetition=last, event=at, nbytes=nbytes))
        return found

    def _first_and_last(self) -> Iterator[int]:
        for start, times, row in self.segments.placed():
            yield from range(start, start + len(row))
            if times > 1:
                yield from range(start + (times - 1) * len(row), start + times * len(row))

    def peak(self) -> Point:
        """The highest requested bytes of the run."""
        return max(self.segment_peaks(), key=lambda p: p.nbytes)

    def host_peak(self, *, managed: bool = False) -> int:
        """The most bytes of host memory (or of unified memory) that tensors take at any time."""
        sizes = [t.host_bytes if t.managed is managed else 0 for t in self.tensors]
        if not any(sizes):
            return 0
        return highest(self.segments, sizes)

    def phase_peaks(self) -> dict[Phase, Point]:
        """The highest point of each phase that occurs, highest first."""
        best: dict[Phase, Point] = {}
        for point in self.segment_peaks():
            phase = self.segments[point.segment].phase
            if phase not in best or point.nbytes > best[phase].nbytes:
                best[phase] = point
        return dict(sorted(best.items(), key=lambda item: -item[1].nbytes))

    def live_counts(self, point: Point) -> list[int]:
        """How many copies of each tensor are alive at a point."""
        counts = [0] * len(self.tensors)
        for times, row in self.segments[: point.segment].rows:
            for segment in row:
                _count(counts, segment, times * segment.repeat)
        if self.segments:
            segment = self.segments[point.segment]
            _count(counts, segment, point.repetition)
            _count(counts, segment, 1, upto=point.event + 1)
        return counts

    def breakdown(self, point: Point) -> dict[Role, int]:
        """Requested bytes by role at a point; sums to the point's bytes."""
        totals: dict[Role, int] = {}
        for tensor, count in zip(self.tensors, self.live_counts(point), strict=True):
            if count and tensor.requested:
                totals[tensor.role] = totals.get(tensor.role, 0) + count * tensor.requested
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def end_bytes(self) -> int:
        """Requested bytes still alive at the end."""
        levels = levels_of(self.segments, [t.requested for t in self.tensors])
        rows = zip(self.segments.rows, levels, strict=True)
        return sum(times * grows for (times, _), (_, grows, _) in rows)

    def events(self) -> Iterator[tuple[TimelineSegment, int, str, int]]:
        """(segment, repetition, action, index) of every event, repetitions spelled out."""
        for segment in self.segments:
            for repetition in range(segment.repeat):
                for action, index in segment.events:
                    yield segment, repetition, action, index

    # ------------------------------------------------------------ seconds

    @property
    def seconds(self) -> float:
        """Duration of everything but loading and saving."""
        return sum(
            times * s.seconds * s.repeat
            for times, row in self.segments.rows
            for s in row
            if s.phase not in (Phase.LOAD, Phase.SAVE)
        )


def levels_of(order: Order[TimelineSegment], sizes: list[int]) -> list[Level]:
    """Of each row: live bytes before it, its net change, and of each of its segments the bytes
    since the row's start and its profile."""
    profiles: dict[int, tuple[int, int, int]] = {}  # runs of one block have one list of events
    found: list[Level] = []
    base = 0
    for times, row in order.rows:
        live, starts = 0, list[tuple[int, tuple[int, int, int]]]()
        for segment in row:
            profile = profiles.get(id(segment.events))
            if profile is None:
                profile = profiles[id(segment.events)] = segment_profile(segment, sizes)
            starts.append((live, profile))
            live += segment.repeat * profile[2]
        found.append((base, live, starts))
        base += times * live
    return found


def highest(order: Order[TimelineSegment], sizes: list[int]) -> int:
    """The most bytes that tensors of these sizes have at any time."""
    best = 0
    for (times, row), (base, grows, starts) in zip(
        order.rows, levels_of(order, sizes), strict=True
    ):
        base += (times - 1) * max(grows, 0)
        for segment, (start, (high, _, delta)) in zip(row, starts, strict=True):
            best = max(best, base + start + (segment.repeat - 1) * max(delta, 0) + high)
    return best


def _count(
    counts: list[int], segment: TimelineSegment, times: int, upto: int | None = None
) -> None:
    """Adds what the first `upto` events of a segment, or all of them, change in so many times."""
    for action, tensor in segment.events[:upto]:
        if action == "+":
            counts[tensor] += times
        elif action == "-":
            counts[tensor] -= times
        elif action == "=":
            old, new = segment.pairs[tensor]
            counts[old] -= times
            counts[new] += times


def segment_profile(segment: TimelineSegment, sizes: list[int]) -> tuple[int, int, int]:
    """(highest live bytes within one repetition relative to its start, event of it, net change of
    one repetition)."""
    live = high = 0
    at = -1
    for position, (action, tensor) in enumerate(segment.events):
        if action == ALLOC:
            live += sizes[tensor]
            if live > high:
                high, at = live, position
        elif action == "-":
            live -= sizes[tensor]
    return high, at, live
