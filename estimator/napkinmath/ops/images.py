"""Operations on pictures of axes (rows, channels, height, width): convolutions, norms, pooling,
enlargement, and the mean squared error of a denoiser."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Tensor, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import concatenate
from napkinmath.ops.matmul import autocast_weight
from napkinmath.ops.nodes import freed, gradients_of, made, node, passed, result, workspaces


def convolution(
    t: Tape,
    x: Value,
    name: str,
    channels: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    bias: bool = True,
    groups: int = 1,
    padded: bool = True,
) -> Value:
    """`nn.Conv2d`, padded to keep the size before its stride where it is `padded`: keeps its input
    and its weight, of which one formula makes all gradients (torch derivatives.yaml
    convolution_overrideable).

    cuDNN's workspaces are left out: what it takes turns on the algorithm that it picks.
    """
    rows, inputs, height, width = x.axes
    inner = inputs // groups * kernel * kernel
    parameters: list[Value] = []
    with t.scope(name):
        axes = (channels, inputs // groups, kernel, kernel)
        parameters.append(t.weight("weight", axes, kind="conv").value)
        if bias:
            parameters.append(t.weight("bias", (channels,), kind="bias").value)
    if t.policy.autocast is not None:
        x = cast(t, x, t.policy.autocast)
        parameters = [autocast_weight(t, one) for one in parameters]
    weight = parameters[0]
    sides = [_strided(side, kernel, stride, padded=padded) for side in (height, width)]
    out = result(t, "convolved", (rows, channels, *sides), weight.dtype, (x, *parameters))
    places = product((rows, *sides))
    if groups == 1:
        forward, of_inputs = (
            Gemm(places, channels, inner, weight.dtype),
            Gemm(places, inner, channels, weight.dtype),
        )
        of_weight = Gemm(channels, inner, places, weight.dtype, of_weight=True)
    else:  # each value is read once for each row of the kernel
        forward = of_inputs = of_weight = Move((1 + kernel) * traffic(x))
    backward: list[Gemm | Move] = [of_inputs] if x.requires_grad else []
    if weight.requires_grad:
        backward += [of_weight, Move(traffic(out))]
    node(
        t,
        "convolution",
        (x, *parameters),
        (out,),
        new=(out.tensor,),
        saves=(x.tensor, weight.tensor),
        costs=(forward,),
        backward_costs=backward,
    )
    return out


def _strided(side: Size, kernel: int, stride: int, *, padded: bool) -> Size:
    """A side after a convolution or a pooling."""
    if stride == 1 and padded:
        return side
    reach = side + (2 * (kernel // 2) if padded else 0) - kernel
    return reach // stride + 1 if isinstance(reach, int) else side // stride


def batch_norm(t: Tape, x: Value, name: str) -> Value:
    """`nn.BatchNorm2d` in training: keeps x and two statistics a channel in fp32; its backward makes
    all three gradients, whoever needs them (ATen native/cuda/Normalization.cu
    batch_norm_backward_cuda)."""
    channels = x.axes[1]
    with t.scope(name):
        names = ("weight", "bias")
        parameters = [t.weight(each, (channels,), kind="norm").value for each in names]
        for each in ("running_mean", "running_var"):
            t.weight(each, (channels,), kind="norm", buffer=True)
        t.weight("num_batches_tracked", (1,), kind="norm", dtype=INT64, buffer=True)
        kept = tuple(t.tensor(each, (channels,), FP32) for each in ("mean", "rstd"))
        return _normalized(t, "batch_norm", x, parameters, kept, passes=2)


def _normalized(
    t: Tape, op: str, x: Value, parameters: list[Value], kept: tuple[Tensor, ...], passes: int
) -> Value:
    """x by the statistics `kept` of it; `passes` kernels make the backward."""
    values = [x, *parameters]
    out = result(t, op, x.axes, x.dtype, values)
    gradients = gradients_of(t, values)
    t.append(
        op,
        values,
        (out,),
        forward=(*made(out.tensor, *kept), *(() if out.requires_grad else freed(*kept))),
        saves=(x.tensor, *kept),
        costs=(Move(3 * traffic(x), 2),),
        backward=made(*(g.tensor for g in gradients)),
        gradients=gradients,
        backward_costs=(Move(5 * traffic(x), passes),),
    )
    t.touch(*kept)
    return out


def max_pool(t: Tape, x: Value) -> Value:
    """`nn.MaxPool2d` over 3 x 3 places at half the height and width: keeps its input, and which
    place was taken."""
    rows, channels, height, width = x.axes
    sides = [_strided(side, 3, 2, padded=True) for side in (height, width)]
    axes = (rows, channels, *sides)
    places = t.tensor("places of the largest", axes, INT64)
    out = result(t, "max_pool2d", axes, x.dtype, (x,))
    node(
        t,
        "max_pool2d",
        (x,),
        (out,),
        new=(out.tensor, places),
        saves=(x.tensor, places),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(2 * traffic(x)),),
    )
    if not out.requires_grad:
        t.ops[-1].forward = (*t.ops[-1].forward, *freed(places))
    t.touch(places)
    return out


def mean_of_places(t: Tape, x: Value) -> Value:
    """The mean of each channel over height and width, whose gradient is as large as x."""
    return t.op(
        "mean",
        (x,),
        x.axes[:2],
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        backward_costs=(Move(traffic(x)),),
    )


def global_norm(t: Tape, x: Value) -> Value:
    """`torch.linalg.vector_norm` over height and width of an x whose channels come last: keeps x and
    its output; its backward divides one by the other (FunctionsManual norm_backward). Autocast names
    fp32 as its type, without a cast of x (autocast_mode.h fp32_set_opt_dtype)."""
    wide = x.dtype if t.policy.autocast is None else FP32
    products = ("x / norm", "gradient times it")[: 1 + (wide is not x.dtype)]
    out = t.op(
        "vector_norm",
        (x,),
        (x.axes[0], 1, 1, x.axes[-1]),
        wide,
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        backward_costs=(Move(4 * traffic(x), 2),),
        backward_temporaries=workspaces(t, x.axes, wide, products),
    )
    if out.requires_grad:
        t.ops[-1].saves = (x.tensor, out.tensor)
    return out


def group_norm(t: Tape, x: Value, name: str, groups: int) -> Value:
    """`nn.GroupNorm`: keeps x and two statistics a group; autocast runs and returns it in fp32."""
    with t.scope(name):
        parameters = [
            t.weight(each, (x.axes[1],), kind="norm").value for each in ("weight", "bias")
        ]
        if t.policy.autocast is not None:
            x, parameters = cast(t, x, FP32), [cast(t, p, FP32) for p in parameters]
        kept = tuple(t.tensor(each, (x.axes[0], groups), x.dtype) for each in ("mean", "rstd"))
        return _normalized(t, "group_norm", x, parameters, kept, passes=3)


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


def interpolated(t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
    """`F.interpolate` to fewer places, bilinear; keeps nothing, its gradient is as large as x."""
    moved = traffic(x)
    return t.op(
        "upsample_bilinear",
        (x,),
        axes,
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(2 * moved),),
        backward_costs=(Move(2 * moved),),
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
