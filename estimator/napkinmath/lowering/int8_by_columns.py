"""LLM.int8() as bitsandbytes ran it before 0.45: x quantized by rows and by columns, both factors
in tiles, outliers found as a sparse matrix.

Source: bitsandbytes 0.43 autograd/_functions.py MatMul8bitLt, undo_layout; functional.py
double_quant, get_colrow_absmax, extract_outliers, transform, igemmlt, mm_dequant.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP16, FP32, INT8, INT32, INT64
from napkinmath.base.expr import product
from napkinmath.ir.costs import Dispatch, Gemm, Move, traffic
from napkinmath.ir.ledger import Role, Value, allocs, frees
from napkinmath.lowering.int8_products import ProductSizes, append_int8, with_bias

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
# and a clone. The library's Python chooses the device, checks types and hands over pointers for each,
# which takes the host as long again: BLOOM's layers of four products take 4.0 ms on A100s (tests/whole/
# test_literature.py).
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
    n = ProductSizes(x, w)
    axes = (*x.axes[:-1], n.outputs)
    out = Value(t.tensor("output", axes, x.dtype, role), axes, x.dtype, x.requires_grad)
    saved = (
        t.tensor("x in int8 by columns", (n.rows, n.inputs), INT8),
        t.tensor("scale of each column", (n.inputs,), FP32),
        t.tensor("outlier columns of x", (n.rows, n.outliers), x.dtype),
        t.tensor("outlier column numbers", (n.outliers,), INT64),
    )
    append_int8(
        t,
        fmt,
        (x, w, out),
        forward=_forward(t, x, n, saved, out.tensor),
        saved=saved,
        costs=_costs(x, out, n),
        backward=lambda made: _backward(t, w, x.dtype, n, made),
        backward_costs=(
            Move(3 * traffic(out), _BACKWARD_LAUNCHES[0], waits=True),
            Move(4 * product(w.axes), _BACKWARD_LAUNCHES[1]),
            Dispatch(sum(_BACKWARD_LAUNCHES)),
        ),
    )
    return with_bias(t, out, bias)


def _costs(x: Value, out: Value, n: ProductSizes) -> tuple[Cost, ...]:
    return (
        Move(traffic(x), _LAUNCHES[0], waits=True),
        Move(2 * traffic(x), _LAUNCHES[1], waits=True),
        Move(2 * traffic(x), _LAUNCHES[2]),
        Gemm(n.rows, n.outputs, n.inputs, INT8),
        Move(8 * traffic(out), _LAUNCHES[3]),
        Gemm(n.rows, n.outputs, n.outliers, x.dtype),
        Dispatch(sum(_LAUNCHES)),
    )


def _forward(t: Tape, x: Value, n: ProductSizes, saved: tuple[Tensor, ...], out: Tensor) -> Steps:
    """Every intermediate is a local variable, alive until the result is cloned at the end."""

    def made(name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        return t.tensor(name, axes, dtype, Role.WORKSPACE)

    columns, scales, gathered, numbers = saved
    wide = x.dtype is not FP16
    half = (made("x in fp16", (n.rows, n.inputs), FP16),) if wide else ()
    by_rows, tiles = (
        made(name, (n.rows, n.inputs), INT8) for name in ("x in int8 by rows", "x in tiles")
    )
    row_scales = made("scale of each row", (n.rows,), FP32)
    outlier_rows = made("outlier columns of W", (n.outliers, n.outputs), x.dtype)
    total = made("sum in int32", (n.rows, n.outputs), INT32)
    result = made("result in fp16", (n.rows, n.outputs), FP16)
    cast, added = (
        made(name, (n.rows, n.outputs), x.dtype) for name in ("result", "product of the outliers")
    )
    converted = (*allocs(cast), *frees(result)) if wide else ()
    return (
        *allocs(*half, row_scales, scales, columns, by_rows),
        *frees(*half),
        *allocs(numbers, outlier_rows, gathered, tiles, total, result),
        *converted,
        *allocs(added),
        *frees(added),
        *allocs(out),
        *frees(cast if wide else result, total, tiles, outlier_rows, by_rows, row_scales),
    )


def _backward(t: Tape, w: Weight, dtype: DType, n: ProductSizes, gradient: Tensor) -> Steps:
    def made(name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        return t.tensor(name, axes, dtype, Role.WORKSPACE)

    quantized = [
        made(f"gradient in int8 by {side}", (n.rows, n.outputs), INT8)
        for side in ("columns", "rows")
    ]
    placed, ordered = (made(name, w.axes, INT8) for name in ("W in place", "W in rows"))
    unpacked = made("unpacked weight", w.axes, dtype)
    return (
        *allocs(*quantized, placed, ordered),
        *frees(placed),
        *allocs(unpacked),
        *frees(ordered),
        *allocs(gradient),
        *frees(unpacked, *quantized),
    )
