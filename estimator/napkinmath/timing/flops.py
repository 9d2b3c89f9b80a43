"""Floating-point work of a step: what the model needs (MFU) and what the hardware does (HFU)."""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.ir.costs import Repeated
from napkinmath.ir.ledger import Phase, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.step import Segment, Step
    from napkinmath.ir.timeline import Timeline


def model_flops(step: Step, length: int = 0) -> int:
    """Forward and backward of all micro-steps without recomputation; one multiply-add is 2 FLOP.

    Read off what runs: a gradient that nobody asks for is not computed and not counted. `length`
    replaces the sequence length.
    """
    top = Bindings({**step.symbols, "s": length, "st": length} if length else step.symbols)
    own = {id(op) for run in step.runs for op in run.block.ops}
    known: dict[int, int] = {}
    total = 0
    for repeat, segments in step.micro_steps:
        for segment in segments:
            found = known.get(id(segment))
            if found is None:
                bind = top.extended(dict(segment.symbols))
                found = known[id(segment)] = segment.repeat * _needed(segment, own, bind)
            total += repeat * found
    return total


def _needed(segment: Segment, own: set[int], bind: Bindings) -> int:
    """FLOP of one repetition that the trained model needs: a forward within the backward is run
    again, and other models (a reference, a teacher) are beside it."""
    again = segment.phase is Phase.BACKWARD
    return sum(
        bind(cost.flops)
        for _, work in segment.events
        if isinstance(work, Work) and id(work.op) in own and (work.backward or not again)
        for cost in work.costs
        if not (isinstance(cost, Repeated) and cost.again)
    )


def hardware_flops(timeline: Timeline, first_segment: int) -> int:
    """All floating-point work from a segment on, recomputation included."""
    return sum(
        times * segment.repeat * sum(kernel.flops for kernel in segment.kernels)
        for times, segment in timeline.segments[first_segment:].counted()
    )
