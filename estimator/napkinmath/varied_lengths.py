"""Batches padded to their longest sequence: the allocator's books over micro-steps of changing length.

Every length asks for blocks of other sizes, so that cached blocks are split and new ones reserved: what is reserved depends on the
order in which lengths come and may be twice what one length needs. Several orders are replayed.
"""

from __future__ import annotations

from napkinmath.allocator import Replay, replay
from napkinmath.expr import Bindings
from napkinmath.flops import model_flops
from napkinmath.schedule import phase_times
from napkinmath.simulate import lay_out
from napkinmath.timeline import Stamp, TensorInfo, Timeline, TimelineSegment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.allocator import AllocatorSettings
    from napkinmath.ledger import Tensor
    from napkinmath.schedule import Clock, PhaseTime
    from napkinmath.step import Segment, Step

NUM_ORDERS = 3
NUM_MICRO_STEPS = 32
_MULTIPLIER, _INCREMENT, _MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64  # Knuth's MMIX generator


def micro_step_lengths(lengths: Sequence[int], batch: int, order: int, count: int = NUM_MICRO_STEPS) -> list[int]:
    """Lengths of `count` micro-steps of `batch` sequences drawn from a sample, each padded to its longest; `order` is the seed."""
    state = order + 1
    found: list[int] = []
    for _ in range(count):
        longest = 1
        for _ in range(batch):
            state = (state * _MULTIPLIER + _INCREMENT) % _MODULUS
            longest = max(longest, lengths[(state >> 33) % len(lengths)])
        found.append(longest)
    return found


def replays(step: Step, lengths: Sequence[int], batch: int, settings: AllocatorSettings, *, orders: int = NUM_ORDERS) -> list[Replay]:
    """The books over several orders of the sample's lengths, least reserved first; each order has the longest somewhere."""
    found: list[Replay] = []
    for order in range(orders):
        drawn = micro_step_lengths(lengths, batch, order)
        drawn[(order * 5 + len(drawn) // 2) % len(drawn)] = max(lengths)
        found.append(replay(timeline_of(step, drawn), settings))
    return sorted(found, key=lambda r: r.peak_reserved)


def timeline_of(step: Step, lengths: Sequence[int]) -> Timeline:
    """Loading, then a micro-step of each length; the optimizer steps after every fourth or as accumulation says, whichever is sooner."""
    layout = _Layout(step)
    layout.add([*step.load, *step.workspaces], lengths[0])
    every = min(step.policy.config.gradient_accumulation_steps, 4)
    first, later = step.micro_steps[0][1], step.micro_steps[-1][1]
    for index, length in enumerate(lengths):
        layout.add(first if index % every == 0 else later, length)
        if index % every == every - 1:
            layout.add([*step.update.clip, *(step.update.states if index < every else ()), *step.update.work, *step.update.zero], length)
    return Timeline(layout.infos, layout.order, Stamp(origin="analytic"))


def varied_time(step: Step, timeline: Timeline, clock: Clock, start: int) -> tuple[tuple[PhaseTime, ...], int, int, int]:
    """Mean over micro-steps padded to their longest: (phases, tokens that are not padding, model FLOP, hardware FLOP) of a step.

    `timeline` is the step at its longest, whose update from segment `start` on does not depend on lengths.
    """
    config = step.policy.config
    batch = config.micro_batch_size
    assert isinstance(batch, int)
    drawn = micro_step_lengths(config.batch.lengths, batch, 0)
    layout = _Layout(step, clock)
    for length in drawn:
        layout.add(step.micro_steps[-1][1], length)
    share = config.gradient_accumulation_steps / len(drawn)
    micro = phase_times(Timeline(layout.infos, layout.order, Stamp(origin="analytic")), clock.speed, first_segment=0)
    own = {found.phase for found in micro}
    phases = [
        found.replace(device_s=found.device_s * share, host_s=found.host_s * share, waited_s=found.waited_s * share) for found in micro
    ]
    phases += [found for found in phase_times(timeline, clock.speed, first_segment=start) if found.phase not in own]
    tokens = round(sum(config.batch.lengths) / len(config.batch.lengths) * batch) * config.gradient_accumulation_steps
    needed = sum(model_flops(step, length) for length in drawn) // len(drawn)
    done = sum(segment.repeat * sum(kernel.flops for kernel in segment.kernels) for segment in layout.order)
    return tuple(phases), tokens, needed, round(done * share)


class _Layout:
    """Segments bound to one length after the other; a tensor whose size changes with the length is a tensor of its own."""

    def __init__(self, step: Step, clock: Clock | None = None) -> None:
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
                made = self._made[id(segment), length] = lay_out(segment, bind, self._index_of, self.clock)
            self.order.append(made)

    def _index_of(self, tensor: Tensor, bind: Bindings) -> int:
        nbytes = bind(tensor.nbytes)
        found = self._index.get((tensor, nbytes))
        if found is None:
            found = self._index[tensor, nbytes] = len(self.infos)
            self.infos.append(
                TensorInfo(
                    tensor.name, tensor.role, tensor.module, nbytes, bind(tensor.requested), tensor.dtype.name, tensor.axes, tensor.source
                )
            )
        return found
