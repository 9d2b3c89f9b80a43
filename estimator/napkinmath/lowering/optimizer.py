"""The end of the step: gradient clipping, the optimizer's states and temporaries, zero_grad."""

from __future__ import annotations

from napkinmath.catalog.optimizers import Optimizer, find_optimizer
from napkinmath.costs import Move
from napkinmath.expr import Size, ceil_div
from napkinmath.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.step import Run, Segment


def trained(run: Run) -> list[Weight]:
    """The weights of a block that get a gradient, tied ones once."""
    return [w for w in run.block.weights if w.trainable and not w.tied_to and not w.buffer]


def lower_update(runs: list[Run], policy: Policy) -> Update:
    """Segments of clipping, first and later optimizer steps, and zero_grad."""
    config = policy.config
    row = find_optimizer(policy.stack.default_optimizer if config.optimizer == "auto" else config.optimizer)
    owners = [run for run in runs if trained(run)]
    return Update(
        row,
        clip=_segments("gradient norm", Phase.CLIP, owners, _norms) if config.clip_gradients else [],
        states=_segments("states", Phase.STEP, owners, lambda run: [(ALLOC, t) for w in trained(run) for t in state_tensors(row, w)]),
        work=_work(row, owners),
        zero=_segments("zero_grad", Phase.STEP, runs, lambda run: [(FREE, t) for t in run.block.gradients]),
    )


def _segments(label: str, phase: Phase, owners: list[Run], events_of: Callable[[Run], list[Event]]) -> list[Segment]:
    """One segment a run of equal blocks, repeated for each of them."""
    from napkinmath.step import Segment

    return [Segment(f"{label} of {run.name}", phase, events, run.count, run.stage.symbols) for run in owners if (events := events_of(run))]


class Update:
    """Clipping, state creation (first step only), the update itself, and zero_grad, as segments."""

    __slots__ = ("clip", "optimizer", "states", "work", "zero")

    def __init__(self, optimizer: Optimizer, clip: list[Segment], states: list[Segment], work: list[Segment], zero: list[Segment]) -> None:
        self.optimizer, self.clip, self.states, self.work, self.zero = optimizer, clip, states, work, zero


def state_tensors(row: Optimizer, weight: Weight) -> list[Tensor]:
    """The optimizer's states of one parameter."""
    if row.matrix_only and (len(weight.axes) != 2 or weight.kind in ("embedding", "head")):
        row = find_optimizer(row.fallback)
    return [Tensor(f"{name} of {weight.tensor.name}", (count,), dtype, Role.OPTIMIZER, weight.path, row.source) for name, count, dtype in row.state_tensors(weight)]


def _norms(run: Run) -> list[Event]:
    """clip_grad_norm_: the norm reads every gradient, scaling reads and writes it (both foreach, a scalar each)."""
    moved: Size = 0
    for weight in trained(run):
        moved = moved + 3 * weight.tensor.nbytes
    return [(RUN, Work(None, (Move(moved, 2),), False))]


def _work(row: Optimizer, owners: list[Run]) -> list[Segment]:
    held: dict[int, list[Tensor]] = {}

    def temporaries(run: Run) -> list[Tensor]:
        if id(run) not in held:
            held[id(run)] = [Tensor("foreach temporary", w.axes, w.tensor.dtype, Role.WORKSPACE, w.path) for w in trained(run) for _ in range(row.foreach_copies)]
        return held[id(run)]

    def update(run: Run) -> list[Event]:
        events: list[Event] = []
        for w in trained(run):
            own = [Tensor("step temporary", w.axes, w.tensor.dtype, Role.WORKSPACE, w.path) for _ in range(row.single_copies)]
            cost = Move(_traffic(row, w), max(row.launches_per_parameter, 1))
            events += [*((ALLOC, t) for t in own), (RUN, Work(None, (cost,), False)), *((FREE, t) for t in own)]
        return events

    before = _segments("foreach temporaries", Phase.STEP, owners, lambda run: [(ALLOC, t) for t in temporaries(run)])
    after = _segments("foreach temporaries released", Phase.STEP, owners, lambda run: [(FREE, t) for t in temporaries(run)])
    return [*before, *_segments("update", Phase.STEP, owners, update), *after]


def _traffic(row: Optimizer, w: Weight) -> Size:
    """Bytes that the update of one parameter moves: the parameter and gradient, and its states read and written."""
    states: Size = 0
    for _, count, dtype in row.state_tensors(w):
        states = states + ceil_div(count * dtype.bits, 8)
    extra = max(int(row.traffic_passes) - 7, 0)
    return 3 * w.tensor.nbytes + 2 * states + extra * w.tensor.nbytes

