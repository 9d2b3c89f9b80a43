"""Pointwise operations, casts, dropout and softmax."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP16, FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.tape import LIKE, PASS, REDUCE, Tape
from napkinmath.ops.nodes import (
    freed,
    gradients_of,
    made,
    meanwhile,
    node,
    passed,
    same_storage,
    workspaces,
)

INPUT, OUTPUT, NOTHING = "input", "output", "nothing"
# Functions of one tensor that autocast runs in fp32 (aten/src/ATen/autocast_mode.h AT_FORALL_FP32).
WIDENED = frozenset(("exp", "log", "softplus"))


def promote(x: DType, y: DType) -> DType:
    """torch's result type of two floating tensors."""
    if x is y:
        return x
    return FP32 if x.bits == y.bits or FP32 in (x, y) else x if x.bits > y.bits else y


def unary(
    t: Tape,
    name: str,
    x: Value,
    *,
    saves: str = INPUT,
    dtype: DType | None = None,
    role: Role = Role.ACTIVATIONS,
) -> Value:
    """A pointwise function of one tensor that keeps its input, its output or nothing for the
    backward; in fp32 under autocast where that widens it."""
    x = _widened(t, name, x)
    out_dtype = dtype or x.dtype
    moved = traffic(x) + traffic(Value(x.tensor, x.axes, out_dtype))
    out = t.op(
        name,
        (x,),
        x.axes,
        out_dtype,
        saves=(x,) if saves == INPUT else (),
        gradients=(LIKE,),
        costs=(Move(moved),),
        backward_costs=(Move(moved + (traffic(x) if saves != NOTHING else 0)),),
        role=role,
    )
    return _keeping_output(t, out) if saves == OUTPUT else out


def _widened(t: Tape, name: str, x: Value) -> Value:
    return cast(t, x, FP32) if name in WIDENED and t.policy.autocast is not None else x


def _keeping_output(t: Tape, out: Value) -> Value:
    if out.requires_grad:
        t.ops[-1].saves = (out.tensor,)
    return out


def silu(t: Tape, x: Value) -> Value:
    """x * sigmoid(x); keeps x."""
    return unary(t, "silu", x)


def gelu(t: Tape, x: Value) -> Value:
    """GELU, exact or tanh, as one kernel; keeps x."""
    return unary(t, "gelu", x)


def relu(t: Tape, x: Value) -> Value:
    """max(x, 0); keeps its output."""
    return unary(t, "relu", x, saves=OUTPUT)


def tanh(t: Tape, x: Value) -> Value:
    """tanh; keeps its output."""
    return unary(t, "tanh", x, saves=OUTPUT)


def sigmoid(t: Tape, x: Value) -> Value:
    """sigmoid; keeps its output."""
    return unary(t, "sigmoid", x, saves=OUTPUT)


def neg(t: Tape, x: Value) -> Value:
    """-x; keeps nothing."""
    return unary(t, "neg", x, saves=NOTHING)


def scale(t: Tape, x: Value) -> Value:
    """x times (or divided by) a Python number; keeps nothing."""
    return unary(t, "mul scalar", x, saves=NOTHING)


def shift(t: Tape, x: Value) -> Value:
    """x plus a Python number: the gradient passes through."""
    return t.op(
        "add scalar", (x,), x.axes, x.dtype, gradients=(PASS,), costs=(Move(2 * traffic(x)),)
    )


def square(t: Tape, x: Value) -> Value:
    """x ** 2; keeps x."""
    return _power(t, x, ("x ** 1", "2 x"))


def cube(t: Tape, x: Value) -> Value:
    """x ** 3; keeps x."""
    return _power(t, x, ("x ** 2", "3 x ** 2"))


def power(t: Tape, x: Value) -> Value:
    """x ** n for an n below zero; keeps x."""
    return _power(t, x, ("x ** (n - 1)", "n x ** (n - 1)"))


def _power(t: Tape, x: Value, names: tuple[str, str]) -> Value:
    """x ** n, in fp32 under autocast: its backward makes x ** (n - 1), then n times that, then the
    gradient in one expression."""
    if t.policy.autocast is not None:
        x = cast(t, x, FP32)
    return t.op(
        "pow",
        (x,),
        x.axes,
        x.dtype,
        saves=(x,),
        gradients=(LIKE,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(7 * traffic(x), 3),),
        backward_temporaries=workspaces(t, x.axes, x.dtype, names),
    )


def rsqrt(t: Tape, x: Value) -> Value:
    """1 / sqrt(x); keeps its output; its backward cubes it and scales it on the way."""
    out = t.op(
        "rsqrt",
        (x,),
        x.axes,
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(7 * traffic(x), 3),),
        backward_temporaries=workspaces(t, x.axes, x.dtype, ("y ** 3", "-y ** 3 / 2")),
    )
    return _keeping_output(t, out)


def cast(t: Tape, x: Value, dtype: DType, *, role: Role = Role.ACTIVATIONS) -> Value:
    """`x.to(dtype)`: nothing where the type is that already, else a copy; the gradient is cast
    back, and the layout in memory stays."""
    if x.dtype is dtype:
        return x
    out_bytes = traffic(Value(x.tensor, x.axes, dtype))
    out = t.op(
        "to",
        (x,),
        x.axes,
        dtype,
        gradients=(LIKE,),
        label=f"{x.tensor.name} in {dtype}",
        costs=(Move(traffic(x) + out_bytes),),
        backward_costs=(Move(traffic(x) + out_bytes),),
        role=role,
    )
    if x in t.turned:
        t.turned.add(out)
    return out


def copy(
    t: Tape,
    x: Value,
    axes: tuple[Size, ...] | None = None,
    name: str = "contiguous",
    *,
    role: Role = Role.ACTIVATIONS,
) -> Value:
    """A copy with another layout (`contiguous`, or a `reshape` that cannot be a view); its gradient
    is a view."""
    return t.op(
        name,
        (x,),
        axes or x.axes,
        x.dtype,
        gradients=(PASS,),
        costs=(Move(2 * traffic(x)),),
        role=role,
    )


def add(t: Tape, x: Value, y: Value) -> Value:
    """x + y of one shape: the incoming gradient goes to both."""
    dtype = promote(x.dtype, y.dtype)
    return t.op(
        "add",
        (x, y),
        x.axes,
        dtype,
        gradients=tuple(PASS if v.dtype is dtype else LIKE for v in (x, y)),
        costs=(Move(traffic(x, y) + traffic(Value(x.tensor, x.axes, dtype))),),
    )


def add_broadcast(t: Tape, x: Value, y: Value) -> Value:
    """x + y with y repeated along axes that it lacks: its gradient is summed over them."""
    return t.op(
        "add",
        (x, y),
        x.axes,
        x.dtype,
        gradients=(PASS, LIKE),
        costs=(Move(2 * traffic(x) + traffic(y)),),
        backward_costs=(Move(traffic(x, y)),),
    )


def add_bias(t: Tape, x: Value, bias: Value) -> Value:
    """x + bias of x's last axis, in the wider type: the incoming gradient goes to x, its sum over the
    rows to the bias."""
    dtype = promote(x.dtype, bias.dtype)
    return t.op(
        "add",
        (x, bias),
        x.axes,
        dtype,
        gradients=(PASS if x.dtype is dtype else LIKE, LIKE),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(traffic(x)),) if bias.requires_grad else (),
    )


def add_(t: Tape, x: Value, y: Value) -> Value:
    """x += y in place: no new storage."""
    out = Value(x.tensor, x.axes, x.dtype, x.requires_grad or y.requires_grad)
    cost = Move(traffic(x, x, y))
    t.append("add_", (x, y), (out,), forward=(), gradients=passed(x, y), costs=(cost,))
    return out


def scale_(t: Tape, x: Value, factor: Value) -> Value:
    """x *= factor in place, a tensor of one element without a gradient: no new storage; the
    gradient is a new tensor."""
    out = same_storage(x)
    node(t, "mul_", (x,), (out,), saves=(factor.tensor,), costs=(Move(2 * traffic(x)),))
    return out


def clamp_(t: Tape, x: Value) -> Value:
    """x clamped in place: a copy of x is kept for the backward, which makes a mask and the
    gradient."""
    out = same_storage(x)
    if not x.requires_grad:
        t.append("clamp_", (x,), (out,), forward=(), costs=(Move(2 * traffic(x)),))
        return out
    kept, gradients = t.tensor("x before clamping", x.axes, x.dtype), gradients_of(t, (x,))
    mask = workspaces(t, x.axes, BOOL, ("x >= low", "x <= high", "inside"))
    t.append(
        "clamp_",
        (x,),
        (out,),
        forward=made(kept),
        saves=(kept,),
        costs=(Move(4 * traffic(x), 2),),
        backward=(*made(*mask, gradients[0].tensor), *freed(*mask)),
        gradients=gradients,
        backward_costs=(Move(5 * traffic(x), 4),),
    )
    t.touch(kept)
    return out


def clamp(t: Tape, x: Value, low: Value, high: Value) -> Value:
    """x between two tensors of one element: keeps x, from which the backward makes two masks and
    the gradient (FunctionsManual.cpp clamp_backward)."""
    return t.op(
        "clamp",
        (x, low, high),
        x.axes,
        x.dtype,
        saves=(x, low, high),
        gradients=(LIKE, None, None),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(5 * traffic(x), 3),),
        backward_temporaries=workspaces(t, x.axes, BOOL, ("x >= low", "x <= high")),
    )


def mul(t: Tape, x: Value, y: Value) -> Value:
    """x * y; keeps each factor that the other's gradient needs. A smaller factor is broadcast, its
    gradient summed; that of a narrower type is cast after the product."""
    dtype = promote(x.dtype, y.dtype)
    out_axes = x.axes if len(x.axes) >= len(y.axes) else y.axes
    how = tuple(LIKE if v.axes == out_axes and v.dtype is dtype else REDUCE for v in (x, y))
    saves = (y if x.requires_grad else None, x if y.requires_grad else None)
    moved = traffic(x, y) + traffic(Value(x.tensor, out_axes, dtype))
    return t.op(
        "mul",
        (x, y),
        out_axes,
        dtype,
        saves=saves,
        gradients=how,
        costs=(Move(moved),),
        backward_costs=(Move(2 * moved, 2),),
    )


def softmax(t: Tape, x: Value, *, dtype: DType | None = None) -> Value:
    """Softmax over the last axis in `dtype` (autocast makes it fp32); keeps its output.

    The input is cast first; only fp16 to fp32 is one kernel (aten/src/ATen/native/SoftMax.cpp
    softmax). On CUDA the backward multiplies gradient and output into a tensor of their own first
    (native/cuda/SoftMax.cu softmax_backward_cuda_out): one H200 held those bytes more than was
    priced without it.
    """
    wanted = dtype or (FP32 if t.policy.autocast is not None else x.dtype)
    source = x if x.dtype is FP16 and wanted is FP32 else cast(t, x, wanted)
    out = unary(t, "softmax", source, saves=OUTPUT, dtype=wanted)
    if out.requires_grad:
        op, product = t.ops[-1], t.tensor("gradient * softmax", x.axes, wanted, Role.WORKSPACE)
        op.backward = (*op.backward, *meanwhile(product))
        op.backward_costs = (Move(3 * traffic(out)), *op.backward_costs)
    if t.policy.stack.attention.softmax_keeps_input and out.requires_grad:
        t.ops[-1].saves = (source.tensor, out.tensor)
    return out


def dropout(t: Tape, x: Value, probability: float, *, of_adapter: bool = False) -> Value:
    """Dropout in training: nothing at probability 0 or in eval mode; on CUDA a bool mask is kept
    (native_dropout).

    An adapter's is there in a model that was left in eval mode too: PEFT makes its modules in
    training mode (tuners/lora/layer.py update_layer).
    """
    if probability == 0 or not (t.policy.training or of_adapter):
        return x
    mask = t.tensor("dropout mask", x.axes, BOOL)
    cost = Move(2 * traffic(x) + traffic(Value(mask, x.axes, BOOL)))
    out = t.op(
        "dropout",
        (x,),
        x.axes,
        x.dtype,
        saves=(mask,),
        gradients=(LIKE,),
        costs=(cost,),
        backward_costs=(cost,),
    )
    op = t.ops[-1]
    op.forward = (*op.forward, *made(mask), *(() if out.requires_grad else freed(mask)))
    t.touch(mask)
    return out
