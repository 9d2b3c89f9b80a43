"""DoRA: a low-rank update whose columns are rescaled to learned magnitudes, with the norm of the
updated weight computed in every forward.

Source: peft 0.21 tuners/lora/dora.py DoraLinearLayer.forward, tuners/lora/variants.py
DoraLinearVariant.forward.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import product
from napkinmath.ir.costs import Dequantize, Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Value
from napkinmath.ir.tape import LIKE, PASS
from napkinmath.lowering.adapters import lora_weight, low_rank_pair
from napkinmath.lowering.mixed_products import mul_mixed
from napkinmath.lowering.quantized import unpacked
from napkinmath.ops.elementwise import add, cast, dropout, scale, shift
from napkinmath.ops.index import constant
from napkinmath.ops.matmul import autocast_weight, dense_linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.config.train_config import AdapterConfig
    from napkinmath.ir.ledger import Weight
    from napkinmath.ir.tape import Scope, Tape


def dora_update(
    t: Tape,
    result: Value,
    source: Value,
    weight: Weight,
    bias: Value | None,
    outputs: Size,
    config: AdapterConfig,
) -> Value:
    """result + (m / |W + B·A| - 1) · base + m / |W + B·A| · scaling · B(A(x)); with dropout the
    base product is computed again from the dropped x.

    The norm is a constant to autograd, yet B·A goes through an identity matrix as large as the
    input is wide, whose products stay alive, graph and all, to the end of the adapter's forward. So
    does W in the type of x.
    """
    with t.scope() as caller:
        a, b = low_rank_pair(t, source.axes[-1], outputs, config)
        with t.scope("lora_magnitude_vector"):
            magnitude = lora_weight(t, "weight", (outputs,))
        x = dropout(t, source, config.dropout, of_adapter=True)
        caller.local(x, result)
        with t.scope() as frame:
            matrix, norm = _matrix_and_norm(t, frame, x, a, b, weight)
            ratio = _ratio(t, magnitude, norm)
            low = dense_linear(t, dense_linear(t, x, a, None, label="A x"), b, None, label="B A x")
            frame.local(ratio, low)
            if x is not source:
                base = dense_linear(t, x, matrix, None, label="base product of the dropped input")
            else:
                base = _without_bias(t, result, bias)
            frame.local(base)
            rescaled = mul_mixed(t, shift(t, ratio), base)
            update = add(t, rescaled, scale(t, mul_mixed(t, ratio, low)))
        return add(t, result, update)


def _without_bias(t: Tape, result: Value, bias: Value | None) -> Value:
    if bias is None:
        return result
    return t.op(
        "sub",
        (result, bias),
        result.axes,
        result.dtype,
        gradients=(PASS, None),
        costs=(Move(2 * traffic(result)),),
    )


def _ratio(t: Tape, magnitude: Value, norm: Value) -> Value:
    """m / |W + B·A|, whose norm is a constant."""
    cost = Move(3 * traffic(magnitude))
    return t.op(
        "div",
        (magnitude, norm),
        magnitude.axes,
        magnitude.dtype,
        saves=(norm,),
        gradients=(LIKE, None),
        costs=(cost,),
        backward_costs=(cost,),
    )


def _matrix_and_norm(
    t: Tape, frame: Scope, x: Value, a: Value, b: Value, weight: Weight
) -> tuple[Value, Value]:
    """W in the type of x, and the norm of each row of W + scaling · B·A."""
    outputs, inputs = weight.axes
    with t.scope() as inner:
        eye = constant(t, "identity", (inputs, inputs), a.dtype)
        inner.local(eye)
        first, narrow = _product_apart(t, eye, a)
        second, low = _product_apart(t, first, b)
        frame.graph(narrow, low)
    delta = cast(t, second, x.dtype)
    matrix = cast(t, _whole_weight(t, weight), x.dtype)
    frame.local(delta, matrix)
    with t.scope() as inner:
        whole = Value(matrix.tensor, weight.axes, matrix.dtype)
        scaled = scale(t, Value(delta.tensor, weight.axes, delta.dtype))
        total = add(t, whole, scaled)
        inner.local(total)
        dtype = FP32 if t.policy.autocast is not None else total.dtype
        cost = Move(traffic(total))
        norm = t.op("norm of each row", (total,), (outputs,), dtype, costs=(cost,))
        norm = cast(t, norm, total.dtype)
    frame.local(norm)
    return matrix, norm


def _product_apart(t: Tape, x: Value, w: Value) -> tuple[Value, Value]:
    """x·w^T whose graph is thrown away, and x as the graph holds it until then."""
    if t.policy.autocast is not None:
        x, w = cast(t, x, t.policy.autocast), autocast_weight(t, w)
    axes = (*x.axes[:-1], w.axes[0])
    out = Value(t.tensor("product of the norm", axes, x.dtype), axes, x.dtype)
    t.append(
        "linear",
        (x, w),
        (out,),
        forward=((ALLOC, out.tensor),),
        costs=(Gemm(product(x.axes[:-1]), w.axes[0], w.axes[1], x.dtype),),
    )
    return out, x


def _whole_weight(t: Tape, weight: Weight) -> Value:
    """The frozen weight itself, or unpacked where it is quantized."""
    fmt = t.policy.format
    if not weight.constants or fmt is None:
        return Value(weight.tensor, weight.axes, weight.tensor.dtype)
    compute = t.policy.compute_dtype
    *temporaries, dense = unpacked(t, fmt, weight, compute, whole=True)
    steps = (
        *((ALLOC, y) for y in temporaries),
        (ALLOC, dense),
        *((FREE, y) for y in temporaries),
    )
    out = Value(dense, weight.axes, compute)
    t.append(
        "dequantize",
        (weight.value,),
        (out,),
        forward=steps,
        costs=(Dequantize(fmt.dequantize_kernel, weight.elements, fmt.bits, compute),),
    )
    return out
