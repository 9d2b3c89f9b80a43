"""FSDP2 within a pipeline: a stage is gathered once a step, and its gradients are reduced after the
last micro-batch.

Parameters stay gathered between micro-batches, which would else gather them again each; gradients
add up whole until the schedule's end. Sources: torch 2.13 distributed/pipelining/stage.py
backward_maybe_with_nosync, perform_reduce_grad; torchtitan models/llama3/ parallelize.py
(reshard_after_forward_policy "default": not under a pipeline).
"""

from __future__ import annotations

from napkinmath.ir.ledger import Phase
from napkinmath.ir.step import END_OF_STEP, Segment
from napkinmath.lowering.data_parallel.fsdp2 import FullyShard, weight_gradients
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.parallel.pipeline import made_by, scheduled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.parallel.pipeline import Halves
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel


class StageShard(FullyShard):
    """A pipeline stage whose micro-batches neither gather nor reduce between them."""

    def summed(self, backward: list[Segment], *, held: bool) -> list[Segment]:
        """A backward whose gradients stay; `held`: sums of earlier ones are there."""
        if not self.sums:
            return backward
        self.reduces, self.held, self.out = False, held, []
        for segment in backward:
            if segment.name == END_OF_STEP:
                for unit in (unit for unit in self.units if unit.ending):
                    self._tail("gradients kept", Phase.BACKWARD, self._collect(unit))
            index = self.index_of.get(segment.run, -1)
            if index in self.unit_of and segment.phase is Phase.BACKWARD:
                self.gradients[index] = weight_gradients(self.runs[index])
                unit = self.unit_of[index]
                collected = [] if unit.ending else self._collect(unit)
                kept = [event for _, events in collected for event in events]
                segment = segment.copy(events=[*segment.events, *kept], repeat=segment.repeat)
            self.out.append(segment)
        return self.out

    def reduced(self) -> list[Segment]:
        """The reductions of what all backwards left, unit by unit as modules are listed: the root's
        first."""
        self.reduces, self.first, self.held, self.out = True, True, self.sums, []
        self.gradients = {index: weight_gradients(run) for index, run in enumerate(self.runs)}
        for unit in sorted(self.units, key=lambda u: not u.outer):
            run = self.runs[unit.runs[0]]
            counts = [1, run.count - 1] if unit.is_layer and run.count > 1 else [1]
            for place, repeat in enumerate(counts, start=1):
                self.times = repeat
                chunks = self._reshard(unit, last=place == len(counts)) + self._reduce(unit)
                before = len(self.out)
                self._emit(Segment(f"reduction of {run.name}", Phase.BACKWARD, []), chunks)
                self.out[before:] = [segment.copy(repeat=repeat) for segment in self.out[before:]]
        self._end_of_reductions()
        return self.out


class ShardedStages:
    """The model chunks of one pipeline rank, each an FSDP2 module of its own."""

    def __init__(self, model: RankModel, policy: Policy) -> None:
        self.walkers = [StageShard(chunk, policy) for chunk in model.chunks]
        self.model, self.policy = model, policy

    def micro_steps(self) -> list[tuple[int, list[Segment]]]:
        """The schedule's turns, each chunk's first forward with its gathers, and the reductions at
        the end."""
        first, later = (
            [self._halves(walker, first=is_first) for walker in self.walkers]
            for is_first in (True, False)
        )
        turns = scheduled(self.policy, self.model.pipeline_rank, first, later)
        reductions = [segment for walker in self.walkers for segment in walker.reduced()]
        return [*turns, (1, reductions)]

    def _halves(self, walker: StageShard, *, first: bool) -> Halves:
        """A chunk's forward and backward, of its first micro-batch or of a later one."""
        accumulate = not first and not walker.sums
        segments = lower_micro_step(
            walker.runs, made_by(walker.runs, self.model.shared), self.policy, accumulate=accumulate
        )
        start = next(
            (i for i, segment in enumerate(segments) if segment.phase is Phase.BACKWARD),
            len(segments),
        )
        forward, backward = segments[:start], segments[start:]
        return walker.gathered_once(forward, set()) if first else forward, walker.summed(
            backward, held=not first
        )
