"""Floating-point work of a step: what the model needs (MFU) and what the hardware does (HFU)."""

from __future__ import annotations

from napkinmath.base.expr import Bindings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.step import Step
    from napkinmath.ir.timeline import Timeline


def model_flops(step: Step, length: int = 0) -> int:
    """Forward and backward of all micro-steps without recomputation; one multiply-add is 2 FLOP.

    A frozen weight's gradient is not computed and not counted. `length` replaces the sequence
    length.
    """
    top = Bindings({**step.symbols, "s": length, "st": length} if length else step.symbols)
    total = 0
    for run in step.runs:
        bind = top.extended(dict(run.stage.symbols))
        for op in run.block.ops:
            total += run.count * sum(bind(cost.flops) for cost in (*op.costs, *op.backward_costs))
    return total * step.policy.config.gradient_accumulation_steps


def hardware_flops(timeline: Timeline, first_segment: int) -> int:
    """All floating-point work from a segment on, recomputation included."""
    return sum(
        segment.repeat * sum(kernel.flops for kernel in segment.kernels)
        for segment in timeline.segments[first_segment:]
    )
