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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.base.expr import Bindings


class TensorInfo:
    """A row of the tensor table: `requested` is `nbytes` rounded up to 512 B; `host_bytes` is what
    it takes of the host's memory, or of unified memory if `managed`; `bindings` are those under which
    `axes` give its bytes, None where no axes are known."""

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
    ) -> None:
        self.host_bytes, self.managed, self.bindings = host_bytes, managed, bindings
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
    """

    __slots__ = ("events", "kernels", "name", "pairs", "phase", "repeat", "seconds")

    def __init__(
        self,
        name: str,
        phase: Phase,
        repeat: int,
        events: list[tuple[str, int]],
        pairs: list[tuple[int, int]],
        kernels: list[Kernel] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.name, self.phase, self.repeat, self.events, self.pairs = (
            name,
            phase,
            repeat,
            events,
            pairs,
        )
        self.kernels: list[Kernel] = kernels or []
        self.seconds = seconds  # of one repetition


class Kernel:
    """Work of one operation: seconds, and what bounds it."""

    __slots__ = ("bound", "flops", "launches", "module", "moved", "name", "seconds", "waits")

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
    ) -> None:
        self.waits = waits  # the host reads a result of it: nothing is queued behind
        self.name, self.module, self.seconds, self.flops, self.moved, self.bound, self.launches = (
            name,
            module,
            seconds,
            flops,
            moved,
            bound,
            launches,
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
    """Tensors, segments and their stamp; see the module docstring."""

    __slots__ = ("segments", "stamp", "step_starts", "tensors")

    def __init__(
        self,
        tensors: list[TensorInfo],
        segments: list[TimelineSegment],
        stamp: Stamp,
        step_starts: tuple[int, ...] = (),
    ) -> None:
        self.tensors, self.segments, self.stamp = tensors, segments, stamp
        self.step_starts = step_starts  # index of the first segment of each training step

    # ------------------------------------------------------------ bytes

    def segment_peaks(self) -> list[Point]:
        """The highest requested bytes of every segment, in order."""
        sizes = [t.requested for t in self.tensors]
        base = 0
        found: list[Point] = []
        profiles: dict[int, tuple[int, int, int]] = {}  # a step repeats the same segments
        for index, segment in enumerate(self.segments):
            profile = profiles.get(id(segment))
            if profile is None:
                profile = profiles[id(segment)] = segment_profile(segment, sizes)
            high, at, delta = profile
            last = segment.repeat - 1 if delta > 0 else 0
            found.append(
                Point(segment=index, repetition=last, event=at, nbytes=base + last * delta + high)
            )
            base += segment.repeat * delta
        return found

    def peak(self) -> Point:
        """The highest requested bytes of the run."""
        return max(self.segment_peaks(), key=lambda p: p.nbytes)

    def host_peak(self, *, managed: bool = False) -> int:
        """The most bytes of host memory (or of unified memory) that tensors take at any time."""
        sizes = [t.host_bytes if t.managed is managed else 0 for t in self.tensors]
        if not any(sizes):
            return 0
        base = best = 0
        for segment in self.segments:
            high, _, delta = segment_profile(segment, sizes)
            best = max(best, base + (segment.repeat - 1) * max(delta, 0) + high)
            base += segment.repeat * delta
        return best

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
        for index, segment in enumerate(self.segments[: point.segment + 1]):
            here = index == point.segment
            whole = point.repetition if here else segment.repeat
            for position, (action, tensor) in enumerate(segment.events):
                step = whole + (1 if here and position <= point.event else 0)
                if action == "+":
                    counts[tensor] += step
                elif action == "-":
                    counts[tensor] -= step
                elif action == "=":
                    old, new = segment.pairs[tensor]
                    counts[old] -= step
                    counts[new] += step
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
        sizes = [t.requested for t in self.tensors]
        return sum(segment.repeat * segment_profile(segment, sizes)[2] for segment in self.segments)

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
            s.seconds * s.repeat for s in self.segments if s.phase not in (Phase.LOAD, Phase.SAVE)
        )


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
