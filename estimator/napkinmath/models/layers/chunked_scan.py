"""What scans in chunks are made of: padding to whole chunks, products over them, decays between
positions.

Sources: transformers 5.23 models/mamba2/modeling_mamba2.py mamba2_chunk_scan, segment_sum.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import LIKE, PASS, REDUCE, Tape
from napkinmath.ops.elementwise import copy, unary
from napkinmath.ops.index import constant
from napkinmath.ops.matmul import bmm


def pad(t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
    """`F.pad` along the tokens: a copy even where nothing is added; the gradient is a slice."""
    return t.op("pad", (x,), axes, x.dtype, gradients=(PASS,), costs=(Move(2 * traffic(x)),))


def contract(
    t: Tape,
    name: str,
    x: Value,
    y: Value,
    product: tuple[Size, Size, Size, Size],
    axes: tuple[Size, ...],
    *,
    dense: tuple[bool, bool] = (False, False),
) -> Value:
    """`torch.einsum` of two tensors whose batch axes lie inside: each operand that is not dense is
    copied, then one batched product of (batch, m, n, k)."""
    batch, m, n, k = product
    left, right = (
        v if ready else copy(t, v, name=f"{name}: operand")
        for v, ready in zip((x, y), dense, strict=True)
    )
    return bmm(t, left, right, batch, m, n, k, axes, name=name)


def segment_decays(t: Tape, x: Value, square: tuple[Size, ...]) -> Value:
    """exp(segment_sum(x)): decays between all pairs of positions of a chunk; keeps its output and
    two small masks."""
    with t.scope() as frame:
        masks = [constant(t, f"mask {i + 1}", square[-2:], BOOL) for i in range(2)]
        first = t.op(
            "masked_fill",
            (x, masks[0]),
            square,
            FP32,
            saves=(masks[0],),
            gradients=(REDUCE, None),
            costs=(Move(8 * traffic(x)),),
        )
        running = unary(t, "cumsum", first, saves="nothing")
        frame.local(running)
        second = t.op(
            "masked_fill",
            (running, masks[1]),
            square,
            FP32,
            saves=(masks[1],),
            gradients=(LIKE, None),
            costs=(Move(2 * traffic(running)),),
        )
        return unary(t, "exp", second, saves="output")


def step_sizes(t: Tape, steps: Value, bias: Value) -> Value:
    """clamp(softplus(steps + bias))."""
    biased = t.op(
        "add bias",
        (steps, bias),
        steps.axes,
        steps.dtype,
        gradients=(PASS, LIKE),
        costs=(Move(2 * traffic(steps)),),
    )
    return unary(t, "clamp", unary(t, "softplus", biased))
