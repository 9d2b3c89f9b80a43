"""LLM.int8() as bitsandbytes ran it before 0.45: x quantized by rows and by columns, both factors
in tiles, outliers found as a sparse matrix.

Source: bitsandbytes 0.43 autograd/_functions.py MatMul8bitLt, undo_layout; functional.py
double_quant, get_colrow_absmax, extract_outliers, transform, igemmlt, mm_dequant.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP16, FP32, INT8, INT32, INT64
from napkinmath.base.expr import ceil_div, product
from napkinmath.ir.costs import Dequantize, Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Value
from napkinmath.lowering.int8_products import INPUTS_PER_OUTLIER
from napkinmath.ops.elementwise import add

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Steps, Tensor, Weight
    from napkinmath.ir.tape import Tape
    from napkinmath.ir.weight_format import WeightFormat

# Kernels between which the host reads a result: two fills, zeros, the maxima and the running sum of
# outliers, whose last it reads; three zeros, the quantization and torch.unique, whose length it
# reads; the outliers of W and their scaling, three casts of their numbers, two columns zeroed and
# one gathered, the reordering; the product; its dequantization, the sum with the outliers' product
# and a clone.
_LAUNCHES = (6, 10, 12, 3)
_BACKWARD_LAUNCHES = (
    10,
    3,
)  # the gradient quantized both ways (and not used); the tiles undone, transposed, copied


def int8_linear_by_columns(
    t: Tape, fmt: WeightFormat, x: Value, w: Weight, bias: Value | None, *, role: Role
) -> Value:
    """y = x·W^T: x, its columns in int8 and their scales stay on the autograd node; the backward
    unpacks W through two int8 copies."""
    outputs, inputs = w.axes[-2], w.axes[-1]
    rows, outliers = product(x.axes[:-1]), ceil_div(inputs, INPUTS_PER_OUTLIER)
    axes = (*x.axes[:-1], outputs)
    out = Value(t.tensor("output", axes, x.dtype, role), axes, x.dtype, x.requires_grad)
    saved = (
        t.tensor("x in int8 by columns", (rows, inputs), INT8),
        t.tensor("scale of each column", (inputs,), FP32),
        t.tensor("outlier columns of x", (rows, outliers), x.dtype),
        t.tensor("outlier column numbers", (outliers,), INT64),
    )
    gradient = Gradient(x, t.gradient_of(x)) if x.requires_grad else None
    forward = _forward(t, x, saved, rows, inputs, outputs, outliers, out.tensor)
    if gradient is None:
        forward = (*forward, *((FREE, tensor) for tensor in saved))
    t.append(
        "int8 linear",
        (x, w.value),
        (out,),
        forward=forward,
        saves=(x.tensor, *saved) if gradient else (),
        costs=_costs(x, out, rows, inputs, outputs, outliers),
        backward=(
            _backward(t, w, x.dtype, rows, outputs, gradient.tensor)
            if gradient is not None and gradient.tensor is not None
            else ()
        ),
        gradients=(gradient,) if gradient else (),
        backward_costs=(
            Move(3 * traffic(out), _BACKWARD_LAUNCHES[0], waits=True),
            Move(4 * product(w.axes), _BACKWARD_LAUNCHES[1]),
            Dequantize(fmt.dequantize_kernel, w.elements, fmt.bits, x.dtype),
            Gemm(rows, inputs, outputs, x.dtype),
        ),
    )
    if gradient is not None:
        for tensor in saved:
            t.last_use[tensor] = len(t.ops) - 1
    if bias is not None and bias.requires_grad:  # a frozen bias is added by the product itself
        out = add(t, out, Value(bias.tensor, out.axes, out.dtype, True))
    return out


def _costs(
    x: Value, out: Value, rows: Size, inputs: Size, outputs: Size, outliers: Size
) -> tuple[Cost, ...]:
    return (
        Move(traffic(x), _LAUNCHES[0], waits=True),
        Move(2 * traffic(x), _LAUNCHES[1], waits=True),
        Move(2 * traffic(x), _LAUNCHES[2]),
        Gemm(rows, outputs, inputs, INT8),
        Move(8 * traffic(out), _LAUNCHES[3]),
        Gemm(rows, outputs, outliers, x.dtype),
    )


def _forward(
    t: Tape,
    x: Value,
    saved: tuple[Tensor, ...],
    rows: Size,
    inputs: Size,
    outputs: Size,
    outliers: Size,
    out: Tensor,
) -> tuple[tuple[str, Tensor], ...]:
    """Every intermediate is a local variable, alive until the result is cloned at the end."""

    def made(name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        return t.tensor(name, axes, dtype, Role.WORKSPACE)

    columns, scales, gathered, numbers = saved
    half = made("x in fp16", (rows, inputs), FP16) if x.dtype is not FP16 else None
    by_rows, row_scales = (
        made("x in int8 by rows", (rows, inputs), INT8),
        made("scale of each row", (rows,), FP32),
    )
    outlier_rows, tiles = (
        made("outlier columns of W", (outliers, outputs), x.dtype),
        made("x in tiles", (rows, inputs), INT8),
    )
    total, result = (
        made("sum in int32", (rows, outputs), INT32),
        made("result in fp16", (rows, outputs), FP16),
    )
    cast, product_of_outliers = (
        made("result", (rows, outputs), x.dtype),
        made("product of the outliers", (rows, outputs), x.dtype),
    )
    first = ((ALLOC, half),) if half else ()
    converted = ((ALLOC, cast), (FREE, result)) if half else ()
    held = (cast if half else result, total, tiles, outlier_rows, by_rows, row_scales)
    return (
        *first,
        (ALLOC, row_scales),
        (ALLOC, scales),
        (ALLOC, columns),
        (ALLOC, by_rows),
        *((FREE, y) for _, y in first),
        (ALLOC, numbers),
        (ALLOC, outlier_rows),
        (ALLOC, gathered),
        (ALLOC, tiles),
        (ALLOC, total),
        (ALLOC, result),
        *converted,
        (ALLOC, product_of_outliers),
        (FREE, product_of_outliers),
        (ALLOC, out),
        *((FREE, y) for y in held),
    )


def _backward(
    t: Tape, w: Weight, dtype: DType, rows: Size, outputs: Size, gradient: Tensor
) -> Steps:
    def made(name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        return t.tensor(name, axes, dtype, Role.WORKSPACE)

    quantized = [
        made(f"gradient in int8 by {side}", (rows, outputs), INT8) for side in ("columns", "rows")
    ]
    placed, ordered, unpacked = (
        made("W in place", w.axes, INT8),
        made("W in rows", w.axes, INT8),
        made("unpacked weight", w.axes, dtype),
    )
    return (
        *((ALLOC, y) for y in quantized),
        (ALLOC, placed),
        (ALLOC, ordered),
        (FREE, placed),
        (ALLOC, unpacked),
        (FREE, ordered),
        (ALLOC, gradient),
        (FREE, unpacked),
        *((FREE, y) for y in quantized),
    )
