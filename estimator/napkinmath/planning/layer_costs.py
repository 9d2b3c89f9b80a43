"""What a layer's share of a step costs under a split, read off recorded micro-steps."""

from __future__ import annotations

from napkinmath.ir.costs import Collective, Disk, HostPass
from napkinmath.ir.ledger import ALLOC, Phase, Tensor, Work
from napkinmath.memory.simulate import Scopes
from napkinmath.timing.issuing import issued_s
from napkinmath.timing.overlap import COMMUNICATION_STREAM, COPY_STREAM
from napkinmath.timing.schedule import Clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.base.expr import Size
    from napkinmath.ir.step import Run, Segment, Step
    from napkinmath.ir.timeline import Kernel

    SplitKey = tuple[int, int, int, bool]


AXES = ("tensor", "context", "expert")  # of the degrees that split a layer
MICRO_STEPS = 3  # the first makes gradients, the second adds to them, the last also sends them


class LeastCost:
    """What layers, or an end of the model, cost at least; seconds are of the device and of the host
    that issues its kernels."""

    __slots__ = ("first_s", "gradient_bytes", "kept_bytes", "later_s", "stored_bytes", "update_s")

    def __init__(self) -> None:
        self.first_s = [
            0.0
        ] * 4  # of the first micro-batch: device and host forward, device and host backward
        self.later_s = [0.0] * 4  # of one that adds its gradients to others
        self.update_s = 0.0  # of the device in an optimizer step
        self.stored_bytes = 0  # weights and optimizer states
        self.gradient_bytes = 0  # left by the backward
        self.kept_bytes = 0  # of a micro-batch, for its backward

    def add(self, other: LeastCost, times: int = 1) -> None:
        """Grows by so many times another."""
        self.first_s = [x + times * y for x, y in zip(self.first_s, other.first_s, strict=True)]
        self.later_s = [x + times * y for x, y in zip(self.later_s, other.later_s, strict=True)]
        self.update_s += times * other.update_s
        self.stored_bytes += times * other.stored_bytes
        self.gradient_bytes += times * other.gradient_bytes
        self.kept_bytes += times * other.kept_bytes

    @property
    def least_s(self) -> float:
        """Seconds of the device in any micro-batch."""
        return min(found[0] + found[2] for found in (self.first_s, self.later_s))

    def seconds(self, micro_batches: int) -> list[tuple[float, float]]:
        """(of the device, of the host) forward and backward."""
        found = [
            x + (micro_batches - 1) * y for x, y in zip(self.first_s, self.later_s, strict=True)
        ]
        return [(found[0], found[1]), (found[2], found[3])]


class Split:
    """The costs of the model's parts under one split of a layer: (layers in a row, each one's
    cost), and those of the model's ends."""

    __slots__ = ("after", "before", "layers", "whole")

    def __init__(
        self, before: LeastCost, layers: list[tuple[int, LeastCost]], after: LeastCost
    ) -> None:
        self.before, self.layers, self.after = before, layers, after
        self.whole = self.between(0, sum(count for count, _ in layers))

    def between(self, start: int, stop: int) -> LeastCost:
        """Of layers start to stop."""
        found, at = LeastCost(), 0
        for count, cost in self.layers:
            found.add(cost, max(0, min(stop, at + count) - max(start, at)))
            at += count
        return found


def split_of(step: Step, symbols: Mapping[str, Size], clock: Clock) -> Split:
    """The costs of a step's runs, out of its segments, with sizes bound by `symbols`. Tied weights'
    gradients are summed where both ends meet, so their backward is left out."""
    scopes = Scopes(symbols)
    tied = any(weight.tied_to for run in step.runs for weight in run.block.weights)
    before, after, layers = LeastCost(), LeastCost(), list[tuple[int, LeastCost]]()
    for run in step.runs:
        layer = run.stage.checkpointed
        found = _cost(run, step, clock, scopes, backward=layer or not tied)
        if layer:
            layers.append((run.count, found))
        else:
            (after if layers else before).add(found, run.count)
    return Split(before, layers, after)


def _cost(run: Run, step: Step, clock: Clock, scopes: Scopes, *, backward: bool) -> LeastCost:
    """One copy of a run."""
    found = LeastCost()
    first, *later = [
        _micro_step_s(run, segments, clock, scopes, backward=backward)
        for _, segments in step.micro_steps
    ]
    found.first_s, found.later_s = (
        first,
        [min(values) for values in zip(*(later or [first]), strict=True)],
    )
    forward = [s for s in step.micro_steps[0][1] if s.name == run.name and s.phase is Phase.FORWARD]
    found.kept_bytes = max(0, min((_net(s, scopes) for s in forward), default=0))
    found.update_s = (
        sum(
            s.repeat * _device_s(_kernels(s, clock, scopes))
            for s in step.update.work
            if _is_of(s, run)
        )
        / run.count
    )
    found.stored_bytes = max(
        0,
        sum(s.repeat * _net(s, scopes) for s in (*step.load, *step.update.states) if _is_of(s, run))
        // run.count,
    )
    if not step.policy.shards:
        bind = scopes.of(run.stage.symbols)
        stored = {payload for s in step.load for action, payload in s.events if action == ALLOC}
        made = (t for t in run.block.gradients if t not in stored)
        found.gradient_bytes = sum(bind(t.requested) for t in made)
    return found


def _micro_step_s(
    run: Run, segments: list[Segment], clock: Clock, scopes: Scopes, *, backward: bool
) -> list[float]:
    """Seconds of one copy in a micro-step: device and host forward, device and host backward."""
    found: list[float] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        own = [
            (s.repeat, _kernels(s, clock, scopes))
            for s in segments
            if s.name == run.name and s.phase is phase
        ]
        if phase is Phase.BACKWARD and not backward:
            own = []
        issued = [(repeat, issued_s(phase, kernels, clock.speed)) for repeat, kernels in own]
        found.append(_of_a_copy(run, [(repeat, _device_s(kernels)) for repeat, kernels in own]))
        found.append(_of_a_copy(run, issued))
    return found


def _is_of(segment: Segment, run: Run) -> bool:
    return segment.name.endswith(f" of {run.name}")


def _of_a_copy(run: Run, found: list[tuple[int, float]]) -> float:
    """The least of one copy, out of (repeat, what each has): segments that share the copies among
    them, or pieces of every copy."""
    if sum(repeat for repeat, _ in found) == run.count:
        return min(value for _, value in found)
    return sum(repeat * value for repeat, value in found) / run.count


def _kernels(segment: Segment, clock: Clock, scopes: Scopes) -> list[Kernel]:
    """All but what data-parallel ranks exchange, and copy for it: a mesh with stages has fewer of
    them, and may do so once a step; and but the host's part, which more machines share."""
    bind, shared = (
        scopes.of(segment.symbols),
        clock.policy.shards and segment.phase in (Phase.FORWARD, Phase.BACKWARD),
    )
    return [
        kernel
        for _, payload in segment.events
        if isinstance(payload, Work) and (payload.op is not None or not shared)
        for cost, kernel in zip(payload.costs, clock.kernels(payload, bind), strict=True)
        if not isinstance(cost, (HostPass, Disk))
        and (not isinstance(cost, Collective) or cost.axis in AXES)
    ]


def _device_s(kernels: list[Kernel]) -> float:
    """Seconds of what runs on the compute stream."""
    return sum(k.seconds for k in kernels if k.bound not in (COMMUNICATION_STREAM, COPY_STREAM))


def _net(segment: Segment, scopes: Scopes) -> int:
    """Bytes that one repetition leaves."""
    bind = scopes.of(segment.symbols)
    tensors = [
        (action, payload) for action, payload in segment.events if isinstance(payload, Tensor)
    ]
    return sum(
        bind(tensor.requested) * (1 if action == ALLOC else -1) for action, tensor in tensors
    )
