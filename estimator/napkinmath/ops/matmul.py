"""Matrix products: linear layers as the policy lowers them, and batched products of activations."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Role, Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.nodes import freed, made, node, read_by_gradients, result

# What linears that read one value share, in Tape.shared.
FP8_INPUT, LOW_RANK = "input in FP8", "A x"
LINEAR = "linear"


def linear(
    t: Tape,
    x: Value,
    name: str,
    outputs: Size,
    *,
    bias: bool = False,
    kind: str = "linear",
    role: Role = Role.ACTIVATIONS,
    weight: Weight | None = None,
) -> Value:
    """A named `nn.Linear` of the model, lowered as the policy says: plain, quantized, with
    adapters."""
    with t.scope(name):
        return t.policy.linear(t, x, outputs, bias=bias, kind=kind, role=role, weight=weight)


def autocast_weight(t: Tape, w: Value) -> Value:
    """The weight in autocast's type; trained fp32 leaves are cast once and cached until the
    autocast region ends."""
    dtype = t.policy.autocast
    if dtype is None or w.dtype is dtype:
        return w
    return _cast_for_autocast(t, w, dtype, Role.WORKSPACE, cached=w.requires_grad)


def _autocast_input(t: Tape, x: Value, dtype: DType) -> Value:
    """x in autocast's type; fp32 embeddings that were made a leaf are cast once too
    (aten/src/ATen/autocast_mode.cpp cached_cast)."""
    is_leaf = x in t.leaves and x.dtype is FP32
    return _cast_for_autocast(t, x, dtype, Role.ACTIVATIONS, cached=is_leaf)


def _cast_for_autocast(t: Tape, x: Value, dtype: DType, role: Role, *, cached: bool) -> Value:
    found = t.casts.get((id(x), dtype))
    if found is None:
        found = cast(t, x, dtype, role=role)
        if cached:
            t.casts[id(x), dtype] = found
    return found


def dense_linear(
    t: Tape,
    x: Value,
    w: Value,
    bias: Value | None,
    *,
    role: Role = Role.ACTIVATIONS,
    label: str = "",
    outside_autocast: bool = False,
) -> Value:
    """`F.linear`: keeps x where the weight is trained, and the weight where x needs a gradient. Of
    a turned x the trained weight's product reads a copy, which makes one batch axis of its rows; a
    frozen weight's reads it as it lies (aten/src/ATen/native/LinearAlgebra.cpp should_fold)."""
    if t.policy.autocast is not None and not outside_autocast:
        x = _autocast_input(t, x, t.policy.autocast)
        w = autocast_weight(t, w)
        bias = autocast_weight(t, bias) if bias is not None else None
    is_turned = x in t.turned
    if is_turned and w.requires_grad and t.at_least("b", 2):  # rows of one are seen as a matrix
        x = copy(t, x)
    inputs = [v for v in (x, w, bias) if v is not None]
    out = result(t, label or "output", (*x.axes[:-1], w.axes[0]), x.dtype, inputs, role)
    forward, of_gradients = _linear_costs(t, x, w, bias, out)
    node(
        t,
        LINEAR,
        inputs,
        (out,),
        new=(out.tensor,),
        saves=read_by_gradients(x, w),
        costs=(forward,),
        differentiated=(w, x, *inputs[2:]),
        backward_costs=of_gradients,
    )
    if is_turned and bias is not None:
        add_bias_apart(t)
    mark_summed(t, w)
    mark_joined(t, x)
    return out


def add_bias_apart(t: Tape) -> None:
    """Of the linear just recorded, whose input is not contiguous: the product is made without the
    bias, and the sum is a second tensor (aten/src/ATen/native/Linear.cpp linear)."""
    op = t.ops[-1]
    out = op.outputs[0]
    product = t.tensor("product before its bias", out.axes, out.dtype, Role.WORKSPACE)
    op.forward = (*made(product), *op.forward, *freed(product))


def sums_in_product(t: Tape, w: Value) -> bool:
    """Whether the product of a weight's gradient adds to an fp32 buffer."""
    return w.weight is not None and t.policy.sums_in_product(w.weight)


def gradient_bits(t: Tape, w: Value) -> int:
    """Bits that the product of a weight's gradient moves for each element: of a sum that it
    reads and writes, or 0 where it writes a gradient of its own."""
    return 2 * t.policy.main_gradient_dtype.bits if sums_in_product(t, w) else 0


def mark_summed(t: Tape, w: Value) -> None:
    """Says of the operation just recorded that its product has added the weight's gradient to its
    buffer, where it does."""
    if sums_in_product(t, w):
        for gradient in t.ops[-1].gradients:
            gradient.summed = gradient.of is w


def mark_joined(t: Tape, x: Value) -> None:
    """Says of the linear just recorded that the stack has it and others that read x as one."""
    if t.policy.stack.model.joined_projections:
        for gradient in t.ops[-1].gradients:
            gradient.joined = gradient.of is x


def _linear_costs(
    t: Tape, x: Value, w: Value, bias: Value | None, out: Value
) -> tuple[Gemm, list[Gemm | Move]]:
    """The product, and those of the gradients: of the weight, of x and the bias's sum."""
    rows, inputs, outputs = product(x.axes[:-1]), w.axes[1], w.axes[0]
    backward: list[Gemm | Move] = []
    if w.requires_grad:
        bits = gradient_bits(t, w)
        backward.append(Gemm(outputs, inputs, rows, x.dtype, result_bits=bits, of_weight=True))
    if x.requires_grad:
        backward.append(Gemm(rows, inputs, outputs, x.dtype))
    if bias is not None and bias.requires_grad:
        backward.append(Move(traffic(out)))
    return Gemm(rows, outputs, inputs, x.dtype), backward


def bmm(
    t: Tape,
    x: Value,
    y: Value,
    batch: Size,
    m: Size,
    n: Size,
    k: Size,
    axes: tuple[Size, ...],
    *,
    name: str = "bmm",
) -> Value:
    """`batch` products (m x k)·(k x n) of activations; keeps both factors; the second factor's
    gradient is made first."""
    if t.policy.autocast is not None and not t.in_kernel:
        x, y = cast(t, x, t.policy.autocast), cast(t, y, t.policy.autocast)
    return t.op(
        name,
        (y, x),
        axes,
        x.dtype,
        saves=(y if x.requires_grad else None, x if y.requires_grad else None),
        gradients=("like", "like"),
        costs=(Gemm(m, n, k, x.dtype, batch),),
        backward_costs=(Gemm(m, k, n, x.dtype, batch), Gemm(k, n, m, x.dtype, batch)),
    )


def score_product(t: Tape, q: Value, k: Value, *, name: str = "q k^T") -> Value:
    """The scores of heads: q and k of axes (rows, heads, length, head size)."""
    rows, heads, s_q, size = q.axes
    s_kv = k.axes[2]
    return bmm(t, q, k, rows * heads, s_q, s_kv, size, (rows, heads, s_q, s_kv), name=name)


def value_product(t: Tape, probabilities: Value, v: Value) -> Value:
    """Values (rows, heads, keys, size) weighed by probabilities (rows, heads, length, keys)."""
    rows, heads, s_q, s_kv = probabilities.axes
    axes = (rows, heads, s_q, v.axes[3])
    return bmm(t, probabilities, v, rows * heads, s_q, v.axes[3], s_kv, axes, name="scores v")
