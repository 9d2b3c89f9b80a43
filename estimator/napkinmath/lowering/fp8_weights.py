"""Linears over frozen FP8 weights as transformers' FP8Linear runs them under adapters.

Forward: the input cast to FP8 with a scale for 128 values of a row, and a product in FP8 (DeepGEMM,
which is preferred for such blocks on Hopper). Backward: the weight widened by torch's operations,
its scales first, then multiplied by them where it lies. Neither input nor weight is kept. Source:
transformers 5.23 integrations/finegrained_fp8.py fp8_linear, FP8LinearFunction,
_dequantize_fp8_weight; integrations/deepgemm.py deepgemm_fp8_fp4_linear.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP8_E4M3
from napkinmath.base.expr import ceil_div, product
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import Gradient, Role, Value, Weight, allocs, frees
from napkinmath.lowering.fp8_products import Casts
from napkinmath.ops.elementwise import add

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.tape import Tape
    from napkinmath.ir.weight_format import WeightFormat

_WIDENING_LAUNCHES = 4  # scales widened and spread, the weight widened and multiplied


def fp8_weight_linear(
    t: Tape, fmt: WeightFormat, x: Value, w: Weight, bias: Value | None, *, role: Role
) -> Value:
    """y = x W^T in the type of x, autocast or not."""
    dtype, rows, (outputs, inputs) = x.dtype, product(x.axes[:-1]), w.axes
    axes = (*x.axes[:-1], outputs)
    out = Value(t.tensor("output", axes, dtype, role), axes, dtype, x.requires_grad)
    casts = Casts(t, fmt.group_size)
    casts.cast("input", (rows, inputs), dtype, groups=(1, fmt.group_size))
    made = t.gradient_of(x) if x.requires_grad else None
    back: Steps = ()
    if made is not None:
        widen, gone = _widened(t, fmt, w, x)
        back = (*widen, *allocs(made), *gone)
    wide = w.elements * (dtype.bits // 8)
    t.append(
        f"{fmt.name} linear",
        (x, w.value),
        (out,),
        forward=(*allocs(*casts.made, out.tensor), *frees(*casts.made)),
        costs=(Move(casts.moved, casts.launches), Gemm(rows, outputs, inputs, FP8_E4M3)),
        backward=back,
        gradients=(Gradient(x, made),) if made is not None else (),
        backward_costs=(
            Move(w.elements + 3 * wide, _WIDENING_LAUNCHES),
            Gemm(rows, inputs, outputs, dtype),
        ),
    )
    if bias is not None and bias.requires_grad:  # a frozen bias is added where the output lies
        return add(t, out, Value(bias.tensor, out.axes, dtype, True))
    return out


def _widened(t: Tape, fmt: WeightFormat, w: Weight, x: Value) -> tuple[Steps, Steps]:
    """(what makes the weight in the type of x, what drops it)."""
    outputs, inputs = w.axes
    columns = ceil_div(inputs, fmt.group_size)
    small = t.tensor("scales", (fmt.groups(w.axes),), x.dtype, Role.WORKSPACE)
    whole = t.tensor("unpacked weight", w.axes, x.dtype, Role.WORKSPACE)
    spread = t.tensor(
        "scales of rows",
        (ceil_div(outputs, fmt.group_size) * fmt.group_size, columns),
        x.dtype,
        Role.WORKSPACE,
    )
    made = (*allocs(small, whole, spread), *frees(small, spread))
    return made, frees(whole)
