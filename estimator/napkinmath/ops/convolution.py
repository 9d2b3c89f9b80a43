"""Convolutions: patch embeddings of images, and the short causal convolutions of state-space
layers."""

from __future__ import annotations

from napkinmath.base.expr import Size, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import cast, silu
from napkinmath.ops.index import slice_of
from napkinmath.ops.matmul import autocast_weight
from napkinmath.ops.nodes import node, result


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
    gradient, and the weight as well, since one formula makes all (torch derivatives.yaml
    convolution_overrideable).
    """
    parameters = _parameters(t, name, (width, channels, *kernel), bias=bias)
    if t.policy.autocast is not None:
        pixels = cast(t, pixels, t.policy.autocast)
        parameters = [autocast_weight(t, one) for one in parameters]
    dtype = parameters[0].dtype
    patches = result(t, "patches", out, dtype, parameters[:1])
    rows, inner = product(out[:-1]), channels * product(kernel)
    of_weight = (Gemm(width, inner, rows, dtype, of_weight=True), Move(traffic(patches)))
    node(
        t,
        "convolution",
        (pixels, *parameters),
        (patches,),
        new=(patches.tensor,),
        saves=(pixels.tensor, parameters[0].tensor),
        costs=(Gemm(rows, width, inner, dtype),),
        differentiated=parameters,
        backward_costs=of_weight if patches.requires_grad else (),
    )
    return patches


def _parameters(t: Tape, name: str, axes: tuple[Size, ...], *, bias: bool) -> list[Value]:
    """A convolution's weight and, where it has one, its bias."""
    with t.scope(name):
        weight = t.weight("weight", axes, kind="conv").value
        return [weight] + ([t.weight("bias", axes[:1], kind="bias").value] if bias else [])


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
    kept, as SiLU's input. It takes x in the weight's type, and hands back that of x; autocast runs
    it in its own.
    """
    given, (rows, _, length) = x.dtype, x.axes
    parameters = _parameters(t, name, (channels, 1, kernel), bias=bias)
    if t.policy.autocast is not None:
        x = cast(t, cast(t, x, parameters[0].dtype), t.policy.autocast)
        parameters = [autocast_weight(t, one) for one in parameters]
    inputs = [x, *parameters]
    weight, cost = inputs[1], Move((1 + kernel) * traffic(x))
    with t.scope(name):
        axes = (rows, channels, length + (kernel - 1))
        padded = result(t, "convolved", axes, weight.dtype, inputs)
        node(
            t,
            "conv1d",
            inputs,
            (padded,),
            new=(padded.tensor,),
            # one formula for all three gradients: both, trained or not
            saves=(x.tensor, weight.tensor),
            costs=(cost,),
            backward_costs=(cost, cost) if padded.requires_grad else (),
        )
    cut = slice_of(t, padded, x.axes)
    made = silu(t, cut) if activated else cut
    return cast(t, made, given) if t.policy.autocast is not None else made
