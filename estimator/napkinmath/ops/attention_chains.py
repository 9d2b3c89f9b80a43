"""Attention chains of older models that transformers runs operation by operation and in ways of
their own."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.tape import LIKE, PASS, Scope, Tape
from napkinmath.ops.elementwise import add, cast, dropout, promote, scale, softmax
from napkinmath.ops.index import expand_head
from napkinmath.ops.matmul import bmm
from napkinmath.ops.whole_scores import dense_operand, rows_first


def fp32_scores(
    t: Tape,
    q: Value,
    k: Value,
    v: Value,
    *,
    mask: Value | None,
    triangle: Value | None = None,
    scaled: bool = False,
    dropout_p: float = 0.0,
    contiguous: bool = False,
) -> Value:
    """q and k cast to fp32, scores, masks and softmax in fp32, probabilities cast back
    (models/gpt_neo, gptj, codegen _attn).

    `triangle`: a bool table that `where` applies before the mask is added (GPT-Neo). Returns (rows,
    length, heads, size).
    """
    rows, heads, length, size = q.axes
    scores = (rows, heads, length, k.axes[2])
    with t.scope() as frame:
        frame.local(q, k, v)
        wide_q, wide_k = cast(t, q, FP32), cast(t, k, FP32)
        frame.local(wide_q, wide_k)
        weights = bmm(
            t,
            dense_operand(t, wide_q, dense=contiguous),
            dense_operand(t, wide_k, dense=contiguous),
            rows * heads,
            length,
            k.axes[2],
            size,
            scores,
            name="q k^T",
        )
        if triangle is not None:
            weights = t.op(
                "where",
                (weights,),
                scores,
                FP32,
                saves=(triangle,),
                gradients=(LIKE,),
                costs=(Move(2 * traffic(weights)),),
                backward_costs=(Move(2 * traffic(weights)),),
            )
        if scaled:
            weights = scale(t, weights)
        if mask is not None:
            weights = _masked(t, weights, mask)
        weights = cast(t, softmax(t, weights), v.dtype)
        weights = dropout(t, weights, dropout_p)
        frame.local(weights)
        t.hand_back(weights)
        return rows_first(
            t,
            bmm(
                t,
                weights,
                dense_operand(t, v, dense=False),
                rows * heads,
                length,
                size,
                k.axes[2],
                q.axes,
                name="scores v",
            ),
        )


def _masked(t: Tape, weights: Value, mask: Value) -> Value:
    return add(t, weights, Value(mask.tensor, weights.axes, mask.dtype))


def bloom_attention(
    t: Tape,
    frame: Scope,
    q: Value,
    k: Value,
    v: Value,
    *,
    alibi: Value,
    mask: Value | None,
    dropout_p: float = 0.0,
) -> Value:
    """BLOOM: ALiBi enters the score product as its addend; softmax in fp32 (models/bloom
    BloomAttention.forward, whose locals `frame` holds)."""
    rows, heads, length, size = q.axes
    left, right, values = (dense_operand(t, x, dense=False) for x in (q, k, v))
    frame.local(left, right, values)
    weights = _baddbmm(t, alibi, left, right, (rows, heads, length, length))
    frame.local(weights)
    if mask is not None:
        weights = _masked(t, weights, mask)
        frame.local(weights)
    probabilities = dropout(t, cast(t, softmax(t, weights, dtype=FP32), q.dtype), dropout_p)
    frame.local(probabilities)
    t.hand_back(probabilities)
    out = bmm(t, probabilities, values, rows * heads, length, size, length, q.axes, name="scores v")
    return rows_first(t, out)


def _baddbmm(t: Tape, addend: Value, x: Value, y: Value, axes: tuple[Size, ...]) -> Value:
    """addend + alpha · x y^T: the gradients of the factors are scaled after the product, one more
    tensor each."""
    rows, heads, length, size = x.axes
    out = Value(
        t.tensor("alibi + q k^T", axes, x.dtype), axes, x.dtype, x.requires_grad or y.requires_grad
    )
    gradients: list[Gradient] = []
    backward: list[tuple[str, Tensor]] = []
    for factor in (x, y):
        if factor.requires_grad:
            product, scaled = (
                t.tensor("gradient before scaling", factor.axes, factor.dtype, Role.WORKSPACE),
                t.gradient_of(factor),
            )
            backward += [(ALLOC, product), (ALLOC, scaled), (FREE, product)]
            gradients.append(Gradient(factor, scaled))
    cost = Gemm(length, length, size, x.dtype, rows * heads)
    kept = [factor.tensor for factor, other in ((x, y), (y, x)) if other.requires_grad]
    t.append(
        "alibi + q k^T",
        (addend, x, y),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=kept,
        costs=(cost,),
        backward=tuple(backward),
        gradients=gradients,
        backward_costs=(cost, cost),
    )
    return out


def mpt_attention(
    t: Tape,
    frame: Scope,
    q: Value,
    k: Value,
    v: Value,
    *,
    alibi: Value | None,
    mask: Value | None,
    dropout_p: float = 0.0,
) -> Value:
    """MPT: scaled scores plus an fp32 ALiBi bias, filled by a bool mask, softmax in fp32
    (models/mpt MptAttention.forward, whose locals `frame` holds)."""
    rows, heads, length, size = q.axes
    scores = (rows, heads, length, length)
    frame.local(q, k, v)
    weights = scale(
        t,
        bmm(
            t,
            dense_operand(t, q, dense=False),
            dense_operand(t, k, dense=False),
            rows * heads,
            length,
            length,
            size,
            scores,
            name="q k^T",
        ),
    )
    if alibi is not None:
        weights = _add_alibi(t, weights, alibi)
    if mask is not None:
        weights = t.op(
            "masked_fill",
            (weights, mask),
            scores,
            weights.dtype,
            saves=(mask,),
            gradients=(LIKE, None),
            costs=(Move(2 * traffic(weights)),),
            backward_costs=(Move(2 * traffic(weights)),),
        )
    frame.local(weights)
    probabilities = dropout(t, cast(t, softmax(t, cast(t, weights, FP32)), v.dtype), dropout_p)
    frame.local(probabilities)
    t.hand_back(probabilities)
    out = bmm(
        t,
        probabilities,
        dense_operand(t, v, dense=False),
        rows * heads,
        length,
        size,
        length,
        q.axes,
        name="scores v",
    )
    return rows_first(t, out)


def _add_alibi(t: Tape, weights: Value, alibi: Value) -> Value:
    dtype = promote(weights.dtype, alibi.dtype)
    how = PASS if dtype is weights.dtype else LIKE
    return t.op(
        "add alibi",
        (weights, alibi),
        weights.axes,
        dtype,
        gradients=(how, None),
        costs=(Move(3 * traffic(weights)),),
    )


def falcon_attention(
    t: Tape,
    frame: Scope,
    q: Value,
    k: Value,
    v: Value,
    *,
    mask: Value,
    alibi: Value | None,
    dtype: DType,
    dropout_p: float = 0.0,
) -> Value:
    """Falcon's eager chain: softmax in `dtype`, that of the layer's input; with ALiBi the scores
    pass through fp32 (models/falcon FalconAttention.forward)."""
    rows, heads, length, size = q.axes
    scores = (rows, heads, length, length)
    frame.local(q, k, v)
    single = k.axes[1] is not heads
    keys = expand_head(t, k, q.axes) if single else k
    left, right = dense_operand(t, q, dense=False), dense_operand(t, keys, dense=False)
    weights = bmm(t, left, right, rows * heads, length, length, size, scores, name="q k^T")
    if alibi is not None:
        frame.local(weights)
        wide = cast(t, weights, FP32)
        frame.local(wide)
        weights = _add_alibi(t, wide, alibi)
    weights = _scale_in_place(t, weights)
    frame.local(weights)
    with t.scope() as argument:
        total = _masked(t, weights, mask)
        argument.local(total)
        probabilities = softmax(t, total, dtype=dtype)
    probabilities = dropout(t, probabilities, dropout_p)
    frame.local(probabilities)
    t.hand_back(probabilities)
    values = expand_head(t, v, q.axes) if single else v
    out = bmm(
        t,
        probabilities,
        dense_operand(t, values, dense=False),
        rows * heads,
        length,
        size,
        length,
        q.axes,
        name="scores v",
    )
    return rows_first(t, out)


def _scale_in_place(t: Tape, x: Value) -> Value:
    """x times a number in place; its gradient is a scaled copy."""
    out = Value(x.tensor, x.axes, x.dtype, x.requires_grad)
    made = t.gradient_of(x) if x.requires_grad else None
    t.append(
        "mul_ scalar",
        (x,),
        (out,),
        forward=(),
        costs=(Move(2 * traffic(x)),),
        backward=((ALLOC, made),) if made else (),
        gradients=(Gradient(x, made),) if made else (),
        backward_costs=(Move(2 * traffic(x)),),
    )
    return out


def clamped_scores(
    t: Tape, q: Value, k: Value, v: Value, *, mask: Value | None, dropout_p: float = 0.0
) -> Value:
    """XGLM: unscaled scores plus mask, no less than the type's least number; softmax in the model's
    type (models/xglm XGLMAttention.forward)."""
    rows, heads, length, size = q.axes
    scores = (rows, heads, length, length)
    with t.scope() as frame:
        left, right, values = (dense_operand(t, x, dense=False) for x in (q, k, v))
        frame.local(left, right, values)
        weights = bmm(t, left, right, rows * heads, length, length, size, scores, name="q k^T")
        if mask is not None:
            weights = _masked(t, weights, mask)
            halves = (
                t.tensor("equal", scores, BOOL, Role.WORKSPACE),
                t.tensor("less", scores, BOOL, Role.WORKSPACE),
                t.tensor("half of the gradient", scores, weights.dtype, Role.WORKSPACE),
            )
            weights = t.op(
                "maximum",
                (weights,),
                scores,
                weights.dtype,
                saves=(weights,),
                gradients=(LIKE,),
                backward_temporaries=halves,
                costs=(Move(2 * traffic(weights)),),
                backward_costs=(Move(6 * traffic(weights), 4),),
            )
        frame.local(weights)
        clamped, weights = weights, softmax(t, weights)
        frame.release(clamped)
        t.keep(weights)
        probabilities = dropout(t, weights, dropout_p)
        frame.local(weights, probabilities)
        return rows_first(
            t,
            bmm(
                t,
                probabilities,
                values,
                rows * heads,
                length,
                size,
                length,
                q.axes,
                name="scores v",
            ),
        )
