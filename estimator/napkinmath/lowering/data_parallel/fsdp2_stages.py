"""FSDP2 within a pipeline: a stage is gathered once a step, and its gradients are reduced after the
last micro-batch.

Parameters stay gathered between micro-batches, which would else gather them again each; gradients
add up whole until the schedule's end. Sources: torch 2.13 distributed/pipelining/stage.py
backward_maybe_with_nosync, perform_reduce_grad; torchtitan models/llama3/ parallelize.py
(reshard_after_forward_policy "default": not under a pipeline).
"""

from __future__ import annotations

from napkinmath.ir.ledger import Phase
from napkinmath.ir.step import Segment
from napkinmath.lowering.data_parallel.fsdp2 import FullyShard
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.parallel.pipeline import made_by, scheduled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.parallel.pipeline import Halves
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel


class ShardedStages:
    """The model chunks of one pipeline rank, each an FSDP2 module of its own."""

    def __init__(self, model: RankModel, policy: Policy) -> None:
        self.walkers = [FullyShard(chunk, policy) for chunk in model.chunks]
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

    def _halves(self, walker: FullyShard, *, first: bool) -> Halves:
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
        return walker.gathered_once(forward) if first else forward, walker.summed(
            backward, held=not first
        )
