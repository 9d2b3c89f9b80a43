"""Attention chains of older models that transformers runs operation by operation and in ways of
their own."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, DType
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Steps, Value
from napkinmath.ir.tape import LIKE, PASS, Scope, Tape
from napkinmath.ops.elementwise import cast, dropout, promote, scale, softmax
from napkinmath.ops.index import expand_head
from napkinmath.ops.matmul import score_product, value_product
from napkinmath.ops.nodes import (
    freed,
    made,
    node,
    read_by_gradients,
    result,
    same_storage,
    workspaces,
)
from napkinmath.ops.whole_scores import add_mask, dense_operand, rows_first


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
    with t.scope() as frame:
        frame.local(q, k, v)
        wide = cast(t, q, FP32), cast(t, k, FP32)
        frame.local(*wide)
        left, right = (dense_operand(t, x, dense=contiguous) for x in wide)
        weights = score_product(t, left, right)
        if triangle is not None:
            weights = _where(t, "where", (weights,), triangle, FP32)
        if scaled:
            weights = scale(t, weights)
        if mask is not None:
            weights = add_mask(t, weights, mask)
        weights = cast(t, softmax(t, weights), v.dtype)
        return _handed_back(t, frame, dropout(t, weights, dropout_p), v)


def _where(t: Tape, name: str, inputs: tuple[Value, ...], table: Value, dtype: DType) -> Value:
    """Scores, the first of the inputs, where a table that is kept lets them stand."""
    weights, moved = inputs[0], Move(2 * traffic(inputs[0]))
    return t.op(
        name,
        inputs,
        weights.axes,
        dtype,
        saves=(table,),
        gradients=(LIKE, None)[: len(inputs)],
        costs=(moved,),
        backward_costs=(moved,),
    )


def _handed_back(t: Tape, frame: Scope, probabilities: Value, v: Value) -> Value:
    """Probabilities, a local that the layer gives back beside its output, times the values."""
    frame.local(probabilities)
    t.hand_back(probabilities)
    return rows_first(t, value_product(t, probabilities, dense_operand(t, v, dense=False)))


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
    left, right, values = (dense_operand(t, x, dense=False) for x in (q, k, v))
    frame.local(left, right, values)
    weights = _baddbmm(t, alibi, left, right)
    frame.local(weights)
    if mask is not None:
        weights = add_mask(t, weights, mask)
        frame.local(weights)
    probabilities = dropout(t, cast(t, softmax(t, weights, dtype=FP32), q.dtype), dropout_p)
    frame.local(probabilities)
    t.hand_back(probabilities)
    return rows_first(t, value_product(t, probabilities, values))


def _baddbmm(t: Tape, addend: Value, x: Value, y: Value) -> Value:
    """addend + alpha · x y^T: the gradients of the factors are scaled after the product, one more
    tensor each."""
    rows, heads, length, size = x.axes
    out = result(t, "alibi + q k^T", (rows, heads, length, length), x.dtype, (x, y))
    gradients: list[Gradient] = []
    backward: Steps = ()
    for factor in (x, y):
        if factor.requires_grad:
            scaled = t.gradient_of(factor)
            (product,) = workspaces(t, factor.axes, factor.dtype, ("gradient before scaling",))
            backward = (*backward, *made(product, scaled), *freed(product))
            gradients.append(Gradient(factor, scaled))
    cost = Gemm(length, length, size, x.dtype, rows * heads)
    t.append(
        "alibi + q k^T",
        (addend, x, y),
        (out,),
        forward=made(out.tensor),
        saves=read_by_gradients(x, y),
        costs=(cost,),
        backward=backward,
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
    frame.local(q, k, v)
    left, right = dense_operand(t, q, dense=False), dense_operand(t, k, dense=False)
    weights = scale(t, score_product(t, left, right))
    if alibi is not None:
        weights = _add_alibi(t, weights, alibi)
    if mask is not None:
        weights = _where(t, "masked_fill", (weights, mask), mask, weights.dtype)
    frame.local(weights)
    probabilities = dropout(t, cast(t, softmax(t, cast(t, weights, FP32)), v.dtype), dropout_p)
    return _handed_back(t, frame, probabilities, v)


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
    frame.local(q, k, v)
    single = k.axes[1] is not q.axes[1]
    keys = expand_head(t, k, q.axes) if single else k
    left, right = dense_operand(t, q, dense=False), dense_operand(t, keys, dense=False)
    weights = score_product(t, left, right)
    if alibi is not None:
        frame.local(weights)
        wide = cast(t, weights, FP32)
        frame.local(wide)
        weights = _add_alibi(t, wide, alibi)
    weights = _scale_in_place(t, weights)
    frame.local(weights)
    with t.scope() as argument:
        total = add_mask(t, weights, mask)
        argument.local(total)
        probabilities = softmax(t, total, dtype=dtype)
    probabilities = dropout(t, probabilities, dropout_p)
    frame.local(probabilities)
    t.hand_back(probabilities)
    values = expand_head(t, v, q.axes) if single else v
    return rows_first(t, value_product(t, probabilities, dense_operand(t, values, dense=False)))


def _scale_in_place(t: Tape, x: Value) -> Value:
    """x times a number in place; its gradient is a scaled copy."""
    out, moved = same_storage(x), Move(2 * traffic(x))
    node(t, "mul_ scalar", (x,), (out,), costs=(moved,), backward_costs=(moved,))
    return out


def clamped_scores(
    t: Tape, q: Value, k: Value, v: Value, *, mask: Value | None, dropout_p: float = 0.0
) -> Value:
    """XGLM: unscaled scores plus mask, no less than the type's least number; softmax in the model's
    type (models/xglm XGLMAttention.forward)."""
    with t.scope() as frame:
        left, right, values = (dense_operand(t, x, dense=False) for x in (q, k, v))
        frame.local(left, right, values)
        weights = score_product(t, left, right)
        if mask is not None:
            weights = _at_least_lowest(t, add_mask(t, weights, mask))
        frame.local(weights)
        clamped, weights = weights, softmax(t, weights)
        frame.release(clamped)
        t.keep(weights)
        probabilities = dropout(t, weights, dropout_p)
        frame.local(weights, probabilities)
        return rows_first(t, value_product(t, probabilities, values))


def _at_least_lowest(t: Tape, weights: Value) -> Value:
    """torch.max with the type's least number: the gradient is halved where the two are equal."""
    comparisons = workspaces(t, weights.axes, BOOL, ("equal", "less"))
    return t.op(
        "maximum",
        (weights,),
        weights.axes,
        weights.dtype,
        saves=(weights,),
        gradients=(LIKE,),
        backward_temporaries=(
            *comparisons,
            *workspaces(t, weights.axes, weights.dtype, ("half of the gradient",)),
        ),
        costs=(Move(2 * traffic(weights)),),
        backward_costs=(Move(6 * traffic(weights), 4),),
    )
