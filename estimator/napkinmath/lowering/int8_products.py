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
from napkinmath.ir.ledger import Gradient, Role, Value, allocs, frees
from napkinmath.ops.elementwise import add

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Steps, Tensor, Weight
    from napkinmath.ir.tape import Tape
    from napkinmath.ir.weight_format import WeightFormat

# One input in a thousand is an outlier column where a model has them (LLM.int8(), arXiv 2208.07339,
# section 4: about 0.1%).
INPUTS_PER_OUTLIER = 1000
# Kernels beside the product, in three runs between which the host reads a result: abs, >=, any; any
# of columns, nonzero with its sort and sum; quantization, zeroing, two gathers and their
# dequantization, cast, transposition. One more dequantizes the result, one adds.
_LAUNCHES = (3, 4, 7, 2)


class ProductSizes:
    """Rows of x, inputs and outputs of W, and the columns of x that are outliers."""

    __slots__ = ("inputs", "outliers", "outputs", "rows")

    def __init__(self, x: Value, w: Weight) -> None:
        self.rows, self.outputs, self.inputs = product(x.axes[:-1]), w.axes[-2], w.axes[-1]
        self.outliers = ceil_div(self.inputs, INPUTS_PER_OUTLIER)


def int8_linear(
    t: Tape, fmt: WeightFormat, x: Value, w: Weight, bias: Value | None, *, role: Role
) -> Value:
    """y = x·W^T: x stays on the autograd node though the backward does not read it; it unpacks W to
    x's type.

    The sum in int32 and its 16-bit copies exist while they are made: 4 + 2 bytes an output, 2 more
    where x is not fp16.
    """
    n = ProductSizes(x, w)
    axes = (*x.axes[:-1], n.outputs)
    out = Value(t.tensor("output", axes, x.dtype, role), axes, x.dtype, x.requires_grad)
    saved = (
        t.tensor("outlier columns of x", (n.rows, n.outliers), x.dtype),
        t.tensor("outlier column numbers", (n.outliers,), INT64),
    )
    unpacked = t.tensor("unpacked weight", w.axes, x.dtype, Role.WORKSPACE)
    append_int8(
        t,
        fmt,
        (x, w, out),
        forward=_forward(t, x, n, saved, out.tensor),
        saved=saved,
        costs=_costs(x, out, n),
        backward=lambda made: (*allocs(unpacked, made), *frees(unpacked)),
    )
    return with_bias(t, out, bias)


def append_int8(
    t: Tape,
    fmt: WeightFormat,
    values: tuple[Value, Weight, Value],
    *,
    forward: Steps,
    saved: tuple[Tensor, ...],
    costs: Sequence[Cost],
    backward: Callable[[Tensor], Steps],
    backward_costs: Sequence[Cost] = (),
) -> None:
    """Records the product of (x, W, output): the node keeps x and what is `saved`, and its backward
    unpacks W for the gradient of x."""
    x, w, out = values
    n = ProductSizes(x, w)
    made = t.gradient_of(x) if x.requires_grad else None
    t.append(
        "int8 linear",
        (x, w.value),
        (out,),
        forward=forward if made is not None else (*forward, *frees(*saved)),
        saves=(x.tensor, *saved) if made is not None else (),
        costs=costs,
        backward=backward(made) if made is not None else (),
        gradients=(Gradient(x, made),) if made is not None else (),
        backward_costs=(
            *backward_costs,
            Dequantize(fmt.dequantize_kernel, w.elements, fmt.bits, x.dtype),
            Gemm(n.rows, n.inputs, n.outputs, x.dtype),
        ),
    )
    if made is not None:
        for tensor in saved:
            t.last_use[tensor] = len(t.ops) - 1


def with_bias(t: Tape, out: Value, bias: Value | None) -> Value:
    """A frozen bias is added by the product itself."""
    if bias is None or not bias.requires_grad:
        return out
    return add(t, out, Value(bias.tensor, out.axes, out.dtype, True))


def _costs(x: Value, out: Value, n: ProductSizes) -> tuple[Cost, ...]:
    narrow = traffic(Value(x.tensor, x.axes, INT8))
    return (
        Move(4 * traffic(x), _LAUNCHES[0], waits=True),
        Move(traffic(x), _LAUNCHES[1], waits=True),
        Move(3 * traffic(x) + narrow, _LAUNCHES[2]),
        Gemm(n.rows, n.outputs, n.inputs, INT8),
        Move(5 * traffic(out), _LAUNCHES[3]),
        Gemm(n.rows, n.outputs, n.outliers, x.dtype),
    )


def _forward(t: Tape, x: Value, n: ProductSizes, saved: tuple[Tensor, ...], out: Tensor) -> Steps:
    def made(name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        return t.tensor(name, axes, dtype, Role.WORKSPACE)

    sub, index = saved
    narrow = made("output in fp16", (n.rows, n.outputs), FP16)
    half, cast = (), ()
    if x.dtype is not FP16:
        half = (made("x in fp16", (n.rows, n.inputs), FP16),)
        cast = (made("output before the outliers", (n.rows, n.outputs), x.dtype),)
    quantized = made("x in int8", (n.rows, n.inputs), INT8)
    scales = made("scale of each row", (n.rows,), FP32)
    size, mask = (
        made(name, (n.rows, n.inputs), dtype) for name, dtype in (("|x|", FP16), ("outliers", BOOL))
    )
    columns = made("int8 outlier columns of W", (n.outputs, n.outliers), INT8)
    matrix = made("outlier columns of W", (n.outputs, n.outliers), x.dtype)
    total = made("sum in int32", (n.rows, n.outputs), INT32)
    return (
        *allocs(*half, scales, quantized, size, mask),
        *frees(size),
        *allocs(index),
        *frees(mask, *half),
        *allocs(sub, columns, matrix),
        *frees(columns),
        *allocs(total, narrow, *cast),
        *(frees(narrow) if cast else ()),
        *frees(total),
        *allocs(out),
        *frees(*(cast or (narrow,)), matrix, quantized, scales),
    )
