"""Operations on pictures of axes (rows, channels, height, width): convolutions, group norm,
enlargement, and the mean squared error of a denoiser."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import concatenate
from napkinmath.ops.matmul import autocast_weight
from napkinmath.ops.nodes import freed, gradients_of, made, node, passed, result


def convolution(
    t: Tape, x: Value, name: str, channels: int, *, kernel: int = 3, stride: int = 1
) -> Value:
    """`nn.Conv2d` with a bias, padded to keep the size before its stride: keeps its input and its
    weight, of which one formula makes all gradients (torch derivatives.yaml
    convolution_overrideable).

    cuDNN's workspaces are left out: what it takes turns on the algorithm that it picks.
    """
    rows, inputs, height, width = x.axes
    with t.scope(name):
        weight = t.weight("weight", (channels, inputs, kernel, kernel), kind="conv").value
        bias = t.weight("bias", (channels,), kind="bias").value
    if t.policy.autocast is not None:
        x = cast(t, x, t.policy.autocast)
        weight, bias = autocast_weight(t, weight), autocast_weight(t, bias)
    axes = (rows, channels, height // stride, width // stride)
    out = result(t, "convolved", axes, weight.dtype, (x, weight, bias))
    places, inner = product((rows, *axes[2:])), inputs * kernel * kernel
    backward: list[Gemm | Move] = []
    if x.requires_grad:
        backward.append(Gemm(places, inner, channels, weight.dtype))
    if weight.requires_grad:
        backward.append(Gemm(channels, inner, places, weight.dtype, of_weight=True))
        backward.append(Move(traffic(out)))
    node(
        t,
        "convolution",
        (x, weight, bias),
        (out,),
        new=(out.tensor,),
        saves=(x.tensor, weight.tensor),
        costs=(Gemm(places, channels, inner, weight.dtype),),
        backward_costs=backward,
    )
    return out


def group_norm(t: Tape, x: Value, name: str, groups: int) -> Value:
    """`nn.GroupNorm`: keeps x and two statistics a group; autocast runs and returns it in fp32."""
    with t.scope(name):
        parameters = [
            t.weight(each, (x.axes[1],), kind="norm").value for each in ("weight", "bias")
        ]
        if t.policy.autocast is not None:
            x, parameters = cast(t, x, FP32), [cast(t, p, FP32) for p in parameters]
        values = [x, *parameters]
        kept = tuple(t.tensor(each, (x.axes[0], groups), x.dtype) for each in ("mean", "rstd"))
        out, gradients = result(t, "group_norm", x.axes, x.dtype, values), gradients_of(t, values)
        t.append(
            "group_norm",
            values,
            (out,),
            forward=(*made(out.tensor, *kept), *(() if out.requires_grad else freed(*kept))),
            saves=(x.tensor, *kept),
            costs=(Move(3 * traffic(x), 2),),
            backward=made(*(g.tensor for g in gradients)),
            gradients=gradients,
            backward_costs=(Move(5 * traffic(x), 3),),
        )
        t.touch(*kept)
        return out


def enlarged(t: Tape, x: Value) -> Value:
    """`F.interpolate` to twice the height and width by the nearest neighbour; keeps nothing."""
    rows, channels, height, width = x.axes
    moved = 5 * traffic(x)
    return t.op(
        "upsample_nearest",
        (x,),
        (rows, channels, 2 * height, 2 * width),
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(moved),),
        backward_costs=(Move(moved),),
    )


def squared_error(t: Tape, predicted: Value, target: Value) -> Value:
    """`F.mse_loss` of both in fp32: keeps both, the gradient is as large as one."""
    one, other = cast(t, predicted, FP32), cast(t, target, FP32)
    size: Size = traffic(one)
    return t.op(
        "mse_loss",
        (one, other),
        (1,),
        FP32,
        saves=(one, other),
        gradients=(LIKE, None),
        costs=(Move(2 * size),),
        backward_costs=(Move(3 * size),),
        role=Role.LOGITS,
    )


def cat_with_shared(
    t: Tape, x: Value, skip: Value, axes: tuple[Size, ...], *, first: bool = False
) -> Value:
    """`torch.cat` of x and a shared value (which may come `first`), whose gradient is a slice of the
    incoming one: it holds all of that until the backward has come down to it.

    To a slice nothing is added in place: x's is counted as a copy, which is what its sum with a
    second one will be.
    """
    if not x.requires_grad:
        return concatenate(t, (skip, x) if first else (x, skip), axes)
    out = result(t, "cat", axes, x.dtype, (x, skip))
    own = t.gradient_of(x)
    moved = Move(2 * traffic(out))
    if skip.requires_grad:
        skip.hold_gradient_in(t.gradient_of(Value(skip.tensor, axes, skip.dtype)))
    t.append(
        "cat",
        (x, skip),
        (out,),
        forward=made(out.tensor),
        backward=made(own),
        gradients=(Gradient(x, own), *passed(skip)),
        costs=(moved,),
    )
    return out
