"""LLM.int8(): the product of int8 activations and int8 weights, with the few columns of outliers
multiplied in 16 bits.

Source: bitsandbytes 0.50 autograd/_functions.py MatMul8bitLt, backends/cuda/ops.py
int8_vectorwise_quant, int8_linear_matmul and int8_mm_dequant, backends/default/ops.py
int8_mixed_scaled_mm; transformers' threshold of 6.0.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP16, FP32, INT8, INT32, INT64
from napkinmath.base.expr import ceil_div, product
from napkinmath.ir.costs import Dequantize, Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Value
from napkinmath.ops.elementwise import add

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Tensor, Weight
    from napkinmath.ir.tape import Tape
    from napkinmath.ir.weight_format import WeightFormat

# One input in a thousand is an outlier column where a model has them (LLM.int8(), arXiv 2208.07339,
# section 4: about 0.1%).
INPUTS_PER_OUTLIER = 1000
# Kernels beside the product, in three runs between which the host reads a result: abs, >=, any; any
# of columns, nonzero with its sort and sum; quantization, zeroing, two gathers and their
# dequantization, cast, transposition. One more dequantizes the result, one adds.
_LAUNCHES = (3, 4, 7, 2)


def int8_linear(
    t: Tape, fmt: WeightFormat, x: Value, w: Weight, bias: Value | None, *, role: Role
) -> Value:
    """y = x·W^T: x stays on the autograd node though the backward does not read it; it unpacks W to
    x's type.

    The sum in int32 and its 16-bit copies exist while they are made: 4 + 2 bytes an output, 2 more
    where x is not fp16.
    """
    if t.policy.stack.int8_by_columns:
        from napkinmath.lowering.int8_by_columns import int8_linear_by_columns

        return int8_linear_by_columns(t, fmt, x, w, bias, role=role)
    outputs, inputs = w.axes[-2], w.axes[-1]
    rows = product(x.axes[:-1])
    outliers = ceil_div(inputs, INPUTS_PER_OUTLIER)
    out = Value(
        t.tensor("output", (*x.axes[:-1], outputs), x.dtype, role),
        (*x.axes[:-1], outputs),
        x.dtype,
        x.requires_grad,
    )
    sub = t.tensor("outlier columns of x", (rows, outliers), x.dtype)
    index = t.tensor("outlier column numbers", (outliers,), INT64)
    gradient = Gradient(x, t.gradient_of(x)) if x.requires_grad else None
    kept = (x.tensor, sub, index) if gradient else ()
    forward = _forward(t, x, rows, inputs, outputs, outliers, sub, index, out.tensor)
    if not gradient:
        forward = (*forward, (FREE, sub), (FREE, index))
    unpacked = t.tensor("unpacked weight", w.axes, x.dtype, Role.WORKSPACE)
    backward = (
        ((ALLOC, unpacked), (ALLOC, gradient.tensor), (FREE, unpacked))
        if gradient is not None and gradient.tensor is not None
        else ()
    )
    narrow = traffic(Value(x.tensor, x.axes, INT8))
    costs = (
        Move(4 * traffic(x), _LAUNCHES[0], waits=True),
        Move(traffic(x), _LAUNCHES[1], waits=True),
        Move(3 * traffic(x) + narrow, _LAUNCHES[2]),
        Gemm(rows, outputs, inputs, INT8),
        Move(5 * traffic(out), _LAUNCHES[3]),
        Gemm(rows, outputs, outliers, x.dtype),
    )
    t.append(
        "int8 linear",
        (x, w.value),
        (out,),
        forward=forward,
        saves=kept,
        costs=costs,
        backward=backward,
        gradients=(gradient,) if gradient else (),
        backward_costs=(
            Dequantize(fmt.dequantize_kernel, w.elements, fmt.bits, x.dtype),
            Gemm(rows, inputs, outputs, x.dtype),
        ),
    )
    for tensor in (sub, index):
        if gradient:
            t.last_use[tensor] = len(t.ops) - 1
    if bias is not None and bias.requires_grad:  # a frozen bias is added by the product itself
        out = add(t, out, Value(bias.tensor, out.axes, out.dtype, True))
    return out


def _forward(
    t: Tape,
    x: Value,
    rows: Size,
    inputs: Size,
    outputs: Size,
    outliers: Size,
    sub: Tensor,
    index: Tensor,
    out: Tensor,
) -> tuple[tuple[str, Tensor], ...]:
    def made(name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        return t.tensor(name, axes, dtype, Role.WORKSPACE)

    half = made("x in fp16", (rows, inputs), FP16) if x.dtype is not FP16 else None
    quantized, scales = (
        made("x in int8", (rows, inputs), INT8),
        made("scale of each row", (rows,), FP32),
    )
    size, mask = made("|x|", (rows, inputs), FP16), made("outliers", (rows, inputs), BOOL)
    columns, matrix = (
        made("int8 outlier columns of W", (outputs, outliers), INT8),
        made("outlier columns of W", (outputs, outliers), x.dtype),
    )
    total, narrow = (
        made("sum in int32", (rows, outputs), INT32),
        made("output in fp16", (rows, outputs), FP16),
    )
    cast = made("output before the outliers", (rows, outputs), x.dtype) if half else None
    first = ((ALLOC, half),) if half else ()
    converted = ((ALLOC, cast), (FREE, narrow)) if cast else ()
    return (
        *first,
        (ALLOC, scales),
        (ALLOC, quantized),
        (ALLOC, size),
        (ALLOC, mask),
        (FREE, size),
        (ALLOC, index),
        (FREE, mask),
        *((FREE, y) for _, y in first),
        (ALLOC, sub),
        (ALLOC, columns),
        (ALLOC, matrix),
        (FREE, columns),
        (ALLOC, total),
        (ALLOC, narrow),
        *converted,
        (FREE, total),
        (ALLOC, out),
        (FREE, cast or narrow),
        (FREE, matrix),
        (FREE, quantized),
        (FREE, scales),
    )
