"""simulate: binds a step's symbols and lays its segments out as a Timeline; the same rules bind
arrays in a sweep."""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.ir.costs import Gemm
from napkinmath.ir.ledger import ALLOC, RUN, TAKE, Phase, Tensor, Work
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import Kernel, Stamp, TensorInfo, Timeline, TimelineSegment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from napkinmath.base.expr import Size
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.clock import WorkClock
    from napkinmath.ir.ledger import Event, StreamUse
    from napkinmath.ir.step import Segment, Step

    MicroSteps = list[tuple[int, list[Segment]]]


def steps_priced(config: TrainConfig) -> int:
    """Two steps, or one later one with adapters, whose states are too small for it to matter in
    which holes the first step puts them."""
    return 2 if config.adapter is None else 1


def run_order(step: Step, *, steps: int = 2) -> tuple[Order[Segment], tuple[int, ...]]:
    """The segments of loading, of `steps` training steps and of saving, and where each step starts.

    The first step creates the optimizer's states, later ones find them; `steps=1` is a later one,
    its states there from the start.
    """
    before = [*step.load, *(step.workspaces + step.update.states if steps == 1 else ())]
    update, rows, starts = step.update, [(1, before)], list[int]()
    for number in range(steps):
        starts.append(sum(times * len(items) for times, items in rows))
        first = number == 0 and steps > 1
        rows += with_workspaces(step.micro_steps, step) if first else step.micro_steps
        states = update.states if first else []
        rows.append((1, [*update.clip, *states, *update.work, *update.zero]))
    return Order([*rows, (1, step.save)]), tuple(starts)


def with_workspaces(micro_steps: MicroSteps, step: Step) -> MicroSteps:
    """The first step: what a thread makes before its first product, and keeps, is put there: a
    cuBLAS workspace for the caller's and for autograd's, the buffer of decoded weights."""
    waiting: dict[Phase, list[Event]] = {}
    for workspace in step.workspaces:
        waiting.setdefault(workspace.phase, []).extend(workspace.events)
    found: MicroSteps = []
    for times, segments in micro_steps:
        left = times
        while left and waiting:  # what the first time does not make, no other does: at most twice
            made = _with_made(segments, waiting)
            found.append((1, made))
            left -= 1
            if made == segments:
                break
        found.append((left, segments))
    return found


def _with_made(segments: list[Segment], waiting: dict[Phase, list[Event]]) -> list[Segment]:
    """The segments with what is `waiting` for the first product of their phases, which is taken."""
    found: list[Segment] = []
    for segment in segments:
        at = first_product(segment) if segment.phase in waiting else -1
        if at < 0:
            found.append(segment)
            continue
        made = waiting.pop(segment.phase)
        found.append(
            segment.copy(events=[*segment.events[:at], *made, *segment.events[at:]], repeat=1)
        )
        if segment.repeat > 1:
            found.append(segment.copy(repeat=segment.repeat - 1))
    return found


def first_product(segment: Segment) -> int:
    """Position of the first matrix product's allocation; -1 where there is none."""
    for position, (action, payload) in enumerate(segment.events):
        if (
            action == RUN
            and isinstance(payload, Work)
            and any(isinstance(cost, Gemm) for cost in payload.costs)
        ):
            return position
    return -1


class Scopes:
    """The bindings of a step's sizes, and those of its segments that have symbols of their own."""

    __slots__ = ("_known", "top")

    def __init__(self, symbols: Mapping[str, Any]) -> None:
        self.top = Bindings(symbols)
        self._known: dict[tuple[tuple[str, Size], ...], Bindings] = {(): self.top}

    def of(self, symbols: tuple[tuple[str, Size], ...]) -> Bindings:
        """What the sizes of a segment, or of a stage, are bound by."""
        found = self._known.get(symbols)
        if found is None:
            found = self._known[symbols] = self.top.extended(dict(symbols))
        return found


def simulate(step: Step, clock: WorkClock | None = None, *, steps: int = 2) -> Timeline:
    """The timeline of loading the model and running `steps` steps."""
    scopes = Scopes(step.symbols)
    layout = Layout(step, scopes, clock, steps=steps)
    infos = [bound_tensor(tensor, scopes.of(own)) for tensor, own in layout.tensors.items()]
    return Timeline(infos, layout.segments, Stamp(origin="analytic"), layout.starts)


class Layout:
    """A step's events in order, its tensors numbered: what stays as it is when sizes are bound
    anew."""

    __slots__ = ("segments", "starts", "tensors")

    def __init__(
        self, step: Step, scopes: Scopes, clock: WorkClock | None = None, *, steps: int = 2
    ) -> None:
        self.tensors: dict[Tensor, tuple[tuple[str, Size], ...]] = {}
        """Each with the symbols of the segment it first comes in."""
        numbers: dict[Tensor, int] = {}

        def laid_out(segment: Segment) -> TimelineSegment:
            def index_of(tensor: Tensor, _: Bindings) -> int:
                found = numbers.get(tensor)
                if found is None:
                    found = numbers[tensor] = len(numbers)
                    self.tensors[tensor] = segment.symbols
                return found

            return lay_out(segment, scopes.of(segment.symbols), index_of, clock)

        order, self.starts = run_order(step, steps=steps)
        self.segments = _each_once(order, laid_out)

    @property
    def uses(self) -> list[StreamUse | None]:
        """The streams of each tensor, by number."""
        return [tensor.use for tensor in self.tensors]

    def nbytes(self, scopes: Scopes) -> list[int]:
        """The bytes of each tensor under other sizes, by number."""
        return [scopes.of(own)(tensor.nbytes) for tensor, own in self.tensors.items()]


def bound_tensor(tensor: Tensor, bind: Bindings) -> TensorInfo:
    """A tensor with its sizes bound."""
    return TensorInfo(
        tensor.name,
        tensor.role,
        tensor.module,
        bind(tensor.nbytes),
        bind(tensor.requested),
        tensor.dtype.name,
        tensor.axes,
        tensor.source,
        bind(tensor.host_bytes),
        tensor.managed,
        bind,
        tensor.use,
    )


def running(step: Step, clock: WorkClock, scopes: Scopes | None = None) -> Timeline:
    """The kernels of one later step without its tensors: all that its time is read off. Ranks of
    one job may share their `scopes`."""
    bound = scopes or Scopes(step.symbols)

    def priced(segment: Segment) -> TimelineSegment:
        bind = bound.of(segment.symbols)
        works = [payload for _, payload in segment.events if isinstance(payload, Work)]
        kernels = [k for work in works for k in clock.kernels(work, bind)]
        seconds = sum(k.seconds for k in kernels)
        return TimelineSegment(
            segment.name, segment.phase, segment.repeat, [], [], kernels, seconds
        )

    order, starts = run_order(step, steps=1)
    return Timeline([], _each_once(order[starts[-1] :], priced), Stamp(origin="analytic"), (0,))


def _each_once(
    order: Order[Segment], make: Callable[[Segment], TimelineSegment]
) -> Order[TimelineSegment]:
    """What is made of each segment in order; of one that comes again, or of one with the events of
    another, only once."""
    made: dict[int, TimelineSegment] = {}
    by_events: dict[tuple[object, ...], TimelineSegment] = {}

    def found(segment: Segment) -> TimelineSegment:
        known = made.get(id(segment))
        if known is None:
            key = (id(segment.events), segment.symbols)
            same = by_events.get(key)
            if same is None:
                known = by_events[key] = make(segment)
            else:
                known = same.copy(repeat=segment.repeat, name=segment.name, phase=segment.phase)
            made[id(segment)] = known
        return known

    return Order((times, [found(segment) for segment in row]) for times, row in order.rows)


def peak_bytes(step: Step, *, steps: int = 2, scopes: Scopes | None = None) -> int:
    """The highest requested bytes alone, as `simulate(step).peak().nbytes` gives them, without the
    timeline."""
    scopes = scopes or Scopes(step.symbols)
    profiles: dict[tuple[object, ...], tuple[int, int]] = {}
    base = peak = 0
    for times, row in run_order(step, steps=steps)[0].rows:
        begun, highest = base, base
        for segment in row:
            key = (id(segment.events), segment.symbols)
            found = profiles.get(key)
            if found is None:
                found = profiles[key] = _profile(segment, scopes.of(segment.symbols))
            high, net = found
            highest = max(highest, base + high + (segment.repeat - 1) * max(net, 0))
            base += segment.repeat * net
        more = (times - 1) * (base - begun)  # the last time begins with so much more
        peak = max(peak, highest + max(more, 0))
        base += more
    return peak


def _profile(segment: Segment, bind: Bindings) -> tuple[int, int]:
    """(highest live bytes within one repetition, its net change)."""
    live = high = 0
    known = bind.derived
    for action, payload in segment.events:
        if isinstance(payload, Tensor):
            size = known.get(payload)
            if size is None:
                size = known[payload] = bind(payload.requested)
            if action == ALLOC:
                live += size
                if live > high:
                    high = live
            else:
                live -= size
    return high, live


def managed_bytes(step: Step, scopes: Scopes) -> int:
    """The unified memory that a step's paged optimizer states take."""
    states = [
        (segment, tensor)
        for segment in (*step.update.load, *step.update.states)
        for _, tensor in segment.events
        if isinstance(tensor, Tensor)
    ]
    return sum(
        segment.repeat * scopes.of(segment.symbols)(tensor.host_bytes)
        for segment, tensor in states
        if tensor.managed
    )


def lay_out(
    segment: Segment,
    bind: Bindings,
    index_of: Callable[[Tensor, Bindings], int],
    clock: WorkClock | None,
) -> TimelineSegment:
    """A segment with its sizes bound, its tensors numbered by `index_of`, and its work priced."""
    events: list[tuple[str, int]] = []
    pairs: list[tuple[int, int]] = []
    kernels: list[Kernel] = []
    for action, payload in segment.events:
        if isinstance(payload, Tensor):
            events.append((action, index_of(payload, bind)))
        elif isinstance(payload, Work):
            for kernel in clock.kernels(payload, bind) if clock is not None else ():
                events.append((RUN, len(kernels)))
                kernels.append(kernel)
        else:
            events.append((TAKE, len(pairs)))
            pairs.append((index_of(payload[0], bind), index_of(payload[1], bind)))
    seconds = sum(k.seconds for k in kernels)
    return TimelineSegment(
        segment.name,
        segment.phase,
        segment.repeat,
        events,
        pairs,
        kernels,
        seconds,
        empties=segment.empties,
    )
