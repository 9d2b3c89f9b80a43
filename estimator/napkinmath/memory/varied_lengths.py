"""Batches padded to their longest sequence: the allocator's books over micro-steps of changing
length.

Every length asks for blocks of other sizes, so that cached blocks are split and new ones reserved:
what is reserved depends on the order in which lengths come and may be twice what one length needs.
Several orders are replayed.
"""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath.memory.replay import Replay, replay
from napkinmath.memory.simulate import bound_tensor, lay_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.clock import WorkClock
    from napkinmath.ir.ledger import Tensor
    from napkinmath.ir.step import Segment, Step
    from napkinmath.memory.allocator_settings import AllocatorSettings

NUM_ORDERS = 3
NUM_MICRO_STEPS = 32
LONGEST_STEP = 4
MOST_DRAWN = 1024  # sequences of a micro-step that are drawn one by one
_MULTIPLIER, _INCREMENT, _MODULUS = (
    6364136223846793005,
    1442695040888963407,
    1 << 64,
)  # Knuth's MMIX generator


def micro_step_lengths(
    lengths: Sequence[int], batch: int, order: int, count: int = NUM_MICRO_STEPS
) -> list[int]:
    """Lengths of `count` micro-steps of `batch` sequences drawn from a sample, each padded to its
    longest; `order` is the seed. The longest of very many is drawn at once, by its distribution."""
    state = order + 1
    found: list[int] = []
    ranked = sorted(lengths) if batch > MOST_DRAWN else []
    for _ in range(count):
        if ranked:
            state = (state * _MULTIPLIER + _INCREMENT) % _MODULUS
            found.append(_longest(ranked, state / _MODULUS, batch))
            continue
        longest = 1
        for _ in range(batch):
            state = (state * _MULTIPLIER + _INCREMENT) % _MODULUS
            longest = max(longest, lengths[(state >> 33) % len(lengths)])
        found.append(longest)
    return found


def longest_lengths(
    lengths: Sequence[int], sequences: int, count: int = NUM_MICRO_STEPS
) -> list[int]:
    """Lengths of `count` micro-steps in which all ranks wait for the longest of `sequences` drawn
    from a sample."""
    ranked = sorted(lengths)
    return [_longest(ranked, (i + 0.5) / count, sequences) for i in range(count)]


def _longest(ranked: Sequence[int], uniform: float, sequences: int) -> int:
    """The longest of `sequences` drawn from a sorted sample, by one uniform number.

    The longest of n is below a quantile u with probability u^n, so a uniform number's n-th root is
    the quantile that it lies at.
    """
    return ranked[min(len(ranked) - 1, int(len(ranked) * uniform ** (1 / sequences)))]


def replays(
    step: Step,
    lengths: Sequence[int],
    batch: int,
    settings: AllocatorSettings,
    *,
    orders: int = NUM_ORDERS,
) -> list[Replay]:
    """The books over several orders of the sample's lengths, least reserved first; each order has
    the longest somewhere."""
    found: list[Replay] = []
    for order in range(orders):
        drawn = micro_step_lengths(lengths, batch, order)
        drawn[(order * 5 + len(drawn) // 2) % len(drawn)] = max(lengths)
        found.append(replay(timeline_of(step, drawn), settings))
    return sorted(found, key=lambda r: r.peak_reserved)


def timeline_of(step: Step, lengths: Sequence[int]) -> Timeline:
    """Loading, a micro-step of each length, and what comes after a step (an evaluation, saving) at
    the longest; the optimizer steps as accumulation says, but after the fourth at the latest."""
    layout = VariedLayout(step)
    layout.add([*step.load, *step.workspaces], lengths[0])
    turns = _turns(step)
    every = len(turns)
    for index, length in enumerate(lengths):
        layout.add(turns[index % every], length)
        if index % every == every - 1:
            layout.add(
                [
                    *step.update.clip,
                    *(step.update.states if index < every else ()),
                    *step.update.work,
                    *step.update.zero,
                ],
                length,
            )
    layout.add(step.save, max(lengths))
    return Timeline(layout.infos, layout.order, Stamp(origin="analytic"))


def _turns(step: Step) -> list[list[Segment]]:
    """The micro-steps of one optimizer step, at most four: the first, those between, and the last,
    where engines reduce."""
    kinds = [
        segments for repeat, segments in step.micro_steps for _ in range(min(repeat, LONGEST_STEP))
    ]
    return kinds if len(kinds) <= LONGEST_STEP else [*kinds[: LONGEST_STEP - 1], kinds[-1]]


class VariedLayout:
    """Segments bound to one length after the other; a tensor whose size changes with the length is
    a tensor of its own."""

    def __init__(self, step: Step, clock: WorkClock | None = None) -> None:
        self.step, self.clock = step, clock
        self.infos: list[TensorInfo] = []
        self.order: list[TimelineSegment] = []
        self._index: dict[tuple[Tensor, int], int] = {}
        self._made: dict[tuple[int, int], TimelineSegment] = {}

    def add(self, segments: Sequence[Segment], length: int) -> None:
        """Appends segments with the sequence length bound to `length`."""
        top = Bindings({**self.step.symbols, "s": length, "st": length})
        for segment in segments:
            made = self._made.get((id(segment), length))
            if made is None:
                bind = top.extended(dict(segment.symbols))
                made = self._made[id(segment), length] = lay_out(
                    segment, bind, self._index_of, self.clock
                )
            self.order.append(made)

    def _index_of(self, tensor: Tensor, bind: Bindings) -> int:
        nbytes = bind(tensor.nbytes)
        found = self._index.get((tensor, nbytes))
        if found is None:
            found = self._index[tensor, nbytes] = len(self.infos)
            self.infos.append(bound_tensor(tensor, bind))
        return found
