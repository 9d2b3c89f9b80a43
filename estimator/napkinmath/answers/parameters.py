"""The number of parameters of a step's model, and of those that are trained."""

from __future__ import annotations

from napkinmath.base.expr import Bindings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.step import Step
    from napkinmath.memory.pipeline_ranks import WholeModel


def count_parameters(step: Step | WholeModel) -> tuple[int, int]:
    """(base parameters, trained parameters), tied ones once, buffers not counted."""
    base = trained = 0
    top = Bindings(step.symbols)
    for run in step.runs:
        bind = top.extended(dict(run.stage.symbols))
        for weight in run.block.weights:
            if not weight.tied_to and not weight.buffer:
                count = bind(weight.elements) * run.count
                base += count if weight.kind != "adapter" else 0
                trained += count if weight.trainable else 0
    return base, trained
