"""Matrix products: linear layers as the policy lowers them, and batched products of activations."""

from __future__ import annotations

from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Role, Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import cast


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
    key = (id(w), dtype)
    found = t.casts.get(key)
    if found is None:
        found = cast(t, w, dtype, role=Role.WORKSPACE)
        if w.requires_grad:
            t.casts[key] = found
    return found


def dense_linear(
    t: Tape,
    x: Value,
    w: Value,
    bias: Value | None,
    *,
    role: Role = Role.ACTIVATIONS,
    label: str = "",
) -> Value:
    """`F.linear`: keeps x where the weight is trained, and the weight where x needs a gradient."""
    if t.policy.autocast is not None:
        x = cast(t, x, t.policy.autocast)
        w = autocast_weight(t, w)
        bias = autocast_weight(t, bias) if bias is not None else None
    rows, inputs, outputs = product(x.axes[:-1]), w.axes[1], w.axes[0]
    axes = (*x.axes[:-1], outputs)
    tensor = t.tensor(label or "output", axes, x.dtype, role)
    inputs_list = [v for v in (x, w, bias) if v is not None]
    out = Value(tensor, axes, x.dtype, any(v.requires_grad for v in inputs_list))
    gradients: list[Gradient] = []
    costs: list[Gemm | Move] = []
    if w.requires_grad:
        gradients.append(Gradient(w, t.gradient_of(w)))
        costs.append(Gemm(outputs, inputs, rows, x.dtype))
    if x.requires_grad:
        gradients.append(Gradient(x, t.gradient_of(x)))
        costs.append(Gemm(rows, inputs, outputs, x.dtype))
    if bias is not None and bias.requires_grad:
        gradients.append(Gradient(bias, t.gradient_of(bias)))
        costs.append(Move(traffic(out)))
    saves = [v.tensor for v, kept in ((x, w.requires_grad), (w, x.requires_grad)) if kept]
    backward = tuple((ALLOC, g.tensor) for g in gradients if g.tensor is not None)
    t.append(
        "linear",
        inputs_list,
        (out,),
        forward=((ALLOC, tensor),),
        saves=saves,
        costs=(Gemm(rows, outputs, inputs, x.dtype),),
        backward=backward,
        gradients=gradients,
        backward_costs=costs,
    )
    return out


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
    if t.policy.autocast is not None:
        x, y = cast(t, x, t.policy.autocast), cast(t, y, t.policy.autocast)
    saves = (y if x.requires_grad else None, x if y.requires_grad else None)
    return t.op(
        name,
        (y, x),
        axes,
        x.dtype,
        saves=saves,
        gradients=("like", "like"),
        costs=(Gemm(m, n, k, x.dtype, batch),),
        backward_costs=(Gemm(m, k, n, x.dtype, batch), Gemm(k, n, m, x.dtype, batch)),
    )
