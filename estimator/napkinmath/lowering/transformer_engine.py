"""Linears whose products run in FP8 under Transformer Engine: weights are cast once a step, or
wherever they have been gathered, inputs and gradients once each, and the backward keeps inputs in
FP8.

A cast writes both layouts in one pass, because Hopper's FP8 products read both factors along the
summed extent; a norm before the product writes them itself. Weights keep both for the whole step.
The scaling is delayed, Megatron-LM's default (--fp8-recipe): a scale is known before its cast. MXFP8
casts as often; NVFP4 is not priced. Sources: Transformer Engine pytorch/module/linear.py and
layernorm_linear.py (fp8_cast_transpose_fused of weights with is_first_microbatch,
save_for_backward), module/base.py grad_output_preprocess; Megatron-LM
core/extensions/transformer_engine.py TELinear, TELayerNormColumnParallelLinear.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP8_E4M3, FP8_E5M2
from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import (
    ALLOC,
    RUN,
    Gradient,
    Phase,
    Role,
    Tensor,
    Value,
    Weight,
    Work,
    allocs,
    frees,
)
from napkinmath.ir.step import segments
from napkinmath.ops.elementwise import add_bias, cast
from napkinmath.ops.matmul import FP8_INPUT, gradient_bits, mark_joined, mark_summed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event, Steps
    from napkinmath.ir.step import Run, Step
    from napkinmath.ir.tape import Tape

NAME = "FP8 linear, input kept in FP8"
SOURCE = "Transformer Engine pytorch/module/base.py get_weight_workspace"
# A pass that reads 16 bits and writes two layouts of 8; a gathered weight is cast into the one
# layout that its product reads (pytorch/tensor/float8_tensor.py update_usage).
_CAST_BYTES = 4
_ONE_LAYOUT_BYTES = 3
_RESULT_BITS = 16


def cached_fp8_linear(t: Tape, x: Value, w: Weight, bias: Value | None, *, role: Role) -> Value:
    """y = x·W^T in 16 bits of factors in FP8; keeps the FP8 input where the weight is trained."""
    x = cast(t, x, BF16)
    axes, rows = (*x.axes[:-1], w.axes[0]), product(x.axes[:-1])
    tensor = t.tensor("output", axes, BF16, role)
    out = Value(tensor, axes, BF16, x.requires_grad or w.trainable)
    turned = _fp8_input(t, x, trainable=w.trainable)
    steps, gradients, costs = _backward(t, x, w, rows) if out.requires_grad else ((), (), ())
    made, cast_weight = _gathered_weight(t, w)
    t.append(
        NAME,
        (x, w.value, turned),
        (out,),
        forward=(*allocs(*made, tensor), *frees(*made)),
        saves=(turned.tensor,) if w.trainable else (),
        costs=(*cast_weight, Gemm(rows, w.axes[0], w.axes[1], FP8_E4M3, 1, _RESULT_BITS)),
        backward=steps,
        gradients=gradients,
        backward_costs=costs,
    )
    mark_summed(t, w.value)
    mark_joined(t, x)
    return out if bias is None else add_bias(t, out, cast(t, bias, BF16))


def _fp8_input(t: Tape, x: Value, *, trainable: bool) -> Value:
    """The input in FP8 laid out for the weight's gradient, cast once for all products that read
    it; a frozen weight asks for one layout."""
    known = t.shared.get((FP8_INPUT, id(x)))
    if known is not None:
        return known[1]
    plain, turned = (
        t.tensor(name, x.axes, FP8_E4M3) for name in ("input in FP8", "input in FP8, transposed")
    )
    moved = (_CAST_BYTES if trainable else _ONE_LAYOUT_BYTES) * product(x.axes)
    found = Value(turned, x.axes, FP8_E4M3, False)
    t.append(
        "cast to FP8",
        (x,),
        (found,),
        forward=allocs(plain, turned),
        costs=() if _made_by_norm(t, x) else (Move(moved),),
    )
    t.touch(plain)
    t.shared[FP8_INPUT, id(x)] = x, found
    return found


def _gathered_weight(t: Tape, w: Weight) -> tuple[tuple[Tensor, ...], tuple[Move, ...]]:
    """The FP8 copy of a weight that is gathered for the product, and its cast; nothing where the
    rank keeps copies for the whole step."""
    if t.policy.has_whole_weights:
        return (), ()
    made = t.tensor("weight in FP8", w.axes, FP8_E4M3, Role.WORKSPACE)
    return (made,), (Move(_ONE_LAYOUT_BYTES * w.elements),)


def _made_by_norm(t: Tape, x: Value) -> bool:
    """Whether a norm made the value, with nothing but its gathering in between."""
    for op in reversed(t.ops):
        if any(out is x for out in op.outputs):
            if op.name in ("all-gather", "copy to ranks"):
                return _made_by_norm(t, op.inputs[0])
            return "norm" in op.name
    return False


def _backward(
    t: Tape, x: Value, w: Weight, rows: Size
) -> tuple[Steps, tuple[Gradient, ...], tuple[Cost, ...]]:
    """The gradient of x, then that of the weight, from one cast of the incoming gradient."""
    outputs, inputs = w.axes
    casts = [
        t.tensor(name, (rows, outputs), FP8_E5M2, Role.WORKSPACE)
        for name in ("gradient in FP8", "gradient in FP8, transposed")
    ]
    gradients: list[Gradient] = []
    cast_bytes = _CAST_BYTES if w.trainable else _ONE_LAYOUT_BYTES
    costs: list[Cost] = [Move(cast_bytes * rows * outputs)]
    if x.requires_grad:
        gradients.append(Gradient(x, t.gradient_of(x)))
        copies, cast_weight = _gathered_weight(t, w)
        casts += copies
        costs += cast_weight
        costs.append(Gemm(rows, inputs, outputs, FP8_E4M3, 1, _RESULT_BITS))
    if w.trainable:
        gradients.append(Gradient(w.value, t.gradient_of(w.value)))
        bits = gradient_bits(t, w.value) or _RESULT_BITS
        costs.append(Gemm(outputs, inputs, rows, FP8_E4M3, 1, bits))
    made = [g.tensor for g in gradients if g.tensor is not None]
    return (*allocs(*casts, *made), *frees(*casts)), tuple(gradients), tuple(costs)


def keep_weights_in_fp8(step: Step, *, alone: bool = False) -> None:
    """Adds to a step the FP8 copies of its linears' weights, in both layouts, and their cast, which
    the first micro-batch makes.

    `alone`: the update writes FP8 itself, and its two layouts take the place of the 16 bits.
    """
    casts = {id(run): _cast_weights(run) for run in step.runs}

    def held(run: Run) -> list[Event]:
        return [(ALLOC, copy) for weight in casts[id(run)] for copy in _copies(weight)]

    def cast_again(run: Run) -> list[Event]:
        return [
            (RUN, Work(None, (Move(_CAST_BYTES * weight.elements),), False))
            for weight in casts[id(run)]
        ]

    if not alone:
        step.load += segments("weights in FP8", Phase.LOAD, step.runs, held)
    step.update.work += segments("weights to FP8", Phase.STEP, step.runs, cast_again)


def _cast_weights(run: Run) -> list[Weight]:
    found = [op.inputs[1].weight for op in run.block.ops if op.name == NAME]
    return [weight for weight in dict.fromkeys(found) if weight is not None]


def _copies(weight: Weight) -> list[Tensor]:
    return [
        Tensor(
            f"{weight.tensor.name} {layout}",
            weight.axes,
            FP8_E4M3,
            Role.WEIGHTS,
            weight.path,
            SOURCE,
        )
        for layout in ("in FP8", "in FP8, transposed")
    ]
