"""Convolutions: patch embeddings of images, and the short causal convolutions of state-space
layers."""

from __future__ import annotations

from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Value
from napkinmath.ir.tape import Tape


def patch_projection(
    t: Tape,
    pixels: Value,
    name: str,
    out: tuple[Size, ...],
    kernel: tuple[Size, ...],
    channels: Size,
    width: Size,
    *,
    bias: bool = True,
) -> Value:
    """A convolution whose stride is its kernel: patches of `kernel` extents over `channels` become
    rows of `width`.

    `out` has the axes of the output. The pixels need no gradient: it keeps them for the weight's
    gradient.
    """
    with t.scope(name):
        weight = t.weight("weight", (width, channels, *kernel), kind="conv").value
        parameters = [weight] + ([t.weight("bias", (width,), kind="bias").value] if bias else [])
    needs = weight.requires_grad
    tensor = t.tensor("patches", out, weight.dtype)
    result = Value(tensor, out, weight.dtype, needs)
    gradients = [Gradient(p, t.gradient_of(p)) for p in parameters if p.requires_grad]
    rows: Size = product(out[:-1])
    inner: Size = channels * product(kernel)
    cost = Gemm(rows, width, inner, weight.dtype)
    t.append(
        "convolution",
        (pixels, *parameters),
        (result,),
        forward=((ALLOC, tensor),),
        saves=(pixels.tensor,) if needs else (),
        costs=(cost,),
        backward=tuple((ALLOC, g.tensor) for g in gradients if g.tensor),
        gradients=gradients,
        backward_costs=(
            (Gemm(width, inner, rows, weight.dtype), Move(traffic(result))) if needs else ()
        ),
    )
    return result


def causal_convolution(
    t: Tape,
    x: Value,
    name: str,
    channels: Size,
    kernel: int,
    *,
    bias: bool = True,
    activated: bool = True,
) -> Value:
    """A depthwise convolution over time padded on both sides, cut to the length, SiLU:
    transformers' causal_conv1d_fn without its kernel.

    x has axes (rows, channels, length); the convolution's output is `kernel` - 1 longer and is
    kept, as SiLU's input.
    """
    from napkinmath.ops.elementwise import silu
    from napkinmath.ops.index import slice_of

    rows, _, length = x.axes
    with t.scope(name):
        weight = t.weight("weight", (channels, 1, kernel), kind="conv").value
        parameters = [weight] + ([t.weight("bias", (channels,), kind="bias").value] if bias else [])
        axes = (rows, channels, length + (kernel - 1))
        inputs = [x, *parameters]
        needing = [v for v in (x, *parameters) if v.requires_grad]
        padded = Value(t.tensor("convolved", axes, weight.dtype), axes, weight.dtype, bool(needing))
        gradients = [Gradient(v, t.gradient_of(v)) for v in needing]
        saves = (
            (x.tensor, weight.tensor) if needing else ()
        )  # one formula for all three gradients: both, trained or not
        cost = Move((1 + kernel) * traffic(x))
        t.append(
            "conv1d",
            inputs,
            (padded,),
            forward=((ALLOC, padded.tensor),),
            saves=saves,
            costs=(cost,),
            backward=tuple((ALLOC, g.tensor) for g in gradients if g.tensor),
            gradients=gradients,
            backward_costs=(cost, cost) if needing else (),
        )
    cut = slice_of(t, padded, x.axes)
    return silu(t, cut) if activated else cut
