"""Attention that holds the whole matrix of scores: eager code, and the math path of SDPA."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Value
from napkinmath.ir.tape import Scope, Tape
from napkinmath.ops.elementwise import add, add_, cast, copy, dropout, scale, softmax, tanh
from napkinmath.ops.index import constant, expand_head, repeat_heads, single_head
from napkinmath.ops.matmul import score_product, value_product

# Names of the products of SDPA's math path, by which reports know it: heads as they are, or one
# head broadcast to all queries.
MATH_PATH, MATH_PATH_SINGLE = "q k^T of math path", "q k^T of math path, one key head"


def eager_attention(
    t: Tape,
    q: Value,
    k: Value,
    v: Value,
    *,
    groups: Size,
    mask: Value | None,
    dropout_p: float = 0.0,
    scaled: bool = True,
    capped: bool = False,
    contiguous: bool = False,
    fp32_softmax: bool = True,
) -> Value:
    """transformers' eager_attention_forward: scores in the model's type, softmax in fp32, every
    step a tensor of b·a·s².

    `capped`: scores pass through a tanh (Gemma 2). `fp32_softmax` false is the encoders' form
    (BERT, ViT). `contiguous`: q and k lie in memory as (rows, heads, length, size), not as a
    transposed view of a projection. The probabilities are returned to the layer, which holds them
    until it returns. Source: transformers 5.23 models/llama/modeling_llama.py and
    models/gemma2/modeling_gemma2.py eager_attention_forward.
    """
    with t.scope() as frame:
        keys, values = repeated(t, k, groups, q), repeated(t, v, groups, q)
        frame.local(keys, values)
        copied = groups != 1 and not single_head(t, k)
        dense_keys = copied or (contiguous and groups == 1)
        left, right = (
            dense_operand(t, q, dense=contiguous),
            dense_operand(t, keys, dense=dense_keys),
        )
        weights = score_product(t, left, right)
        if t.policy.stack.attention.fused_softmax and not capped:
            weights = scaled_masked_softmax(t, weights)
        else:
            weights = _masked_scores(t, weights, mask, scaled=scaled, capped=capped)
            weights = _probabilities(t, frame, weights, q.dtype, FP32 if fp32_softmax else None)
        weights = dropout(t, weights, dropout_p)
        frame.local(weights)
        t.keep(weights)
        return rows_first(t, value_product(t, weights, dense_operand(t, values, dense=copied)))


def _masked_scores(
    t: Tape, weights: Value, mask: Value | None, *, scaled: bool, capped: bool
) -> Value:
    if scaled:
        weights = scale(t, weights)
    if capped:
        weights = scale(t, tanh(t, scale(t, weights)))
    return weights if mask is None else add_mask(t, weights, mask)


def add_mask(t: Tape, weights: Value, mask: Value) -> Value:
    """Scores plus a mask that is broadcast to them."""
    return add(t, weights, Value(mask.tensor, weights.axes, mask.dtype))


def _probabilities(
    t: Tape, frame: Scope, weights: Value, dtype: DType, softmax_dtype: DType | None
) -> Value:
    """The scores are bound to their name until the softmax and its cast are done."""
    frame.local(weights)
    made = cast(t, softmax(t, weights, dtype=softmax_dtype), dtype)
    frame.release(weights)
    return made


def scaled_masked_softmax(t: Tape, scores: Value) -> Value:
    """One kernel over 16-bit scores: computes in fp32, keeps its result, and its backward writes
    over the incoming gradient.

    Source: Megatron-LM core/fusions/fused_softmax.py ScaledUpperTriangMaskedSoftmax,
    legacy/fused_kernels scaled_masked_softmax_cuda.
    """
    out = t.op(
        "scaled masked softmax",
        (scores,),
        scores.axes,
        scores.dtype,
        gradients=("pass",),
        costs=(Move(2 * traffic(scores)),),
        backward_costs=(Move(3 * traffic(scores)),),
    )
    if out.requires_grad:
        t.ops[-1].saves = (out.tensor,)
    return out


def dense_operand(t: Tape, x: Value, *, dense: bool) -> Value:
    """x as matmul folds rows and heads into one batch axis: a copy where the heads lie inside the
    rows and there are several rows."""
    return x if dense or not t.at_least("b", 2) else copy(t, x, name="operand of matmul")


def rows_first(t: Tape, out: Value) -> Value:
    """(rows, heads, length, size) of a matmul made contiguous as (rows, length, heads, size); the
    gradient is copied back likewise."""
    rows, heads, length, size = out.axes
    viewed = t.view(out, out.axes, copies_gradient=True) if t.at_least("b", 2) else out
    return copy(t, viewed, (rows, length, heads, size))


def math_attention(
    t: Tape,
    q: Value,
    k: Value,
    v: Value,
    *,
    groups: Size,
    mask: Value | None,
    causal: bool = True,
    dropout_p: float = 0.0,
    contiguous: bool = False,
) -> Value:
    """SDPA's math path, in fp32 for half types: q and k scaled into copies, scores and
    probabilities kept.

    A single key/value head without `groups` is broadcast by the products themselves (Falcon 7B).

    Source: aten/src/ATen/native/transformers/attention.cpp _scaled_dot_product_attention_math.
    """
    dtype, t.in_kernel = q.dtype, True
    with t.scope() as frame:
        frame.local(q, k, v)
        if mask is not None:
            mask = additive_mask(t, mask, dtype)
            frame.local(mask)
        # reduced-precision reductions are off by default
        q, k, v = (cast(t, x, FP32) for x in (q, k, v))
        scaled_q = scale(t, q)
        bias = mask if mask is not None or not causal else _causal_bias(t, q.axes[2], k.axes[2])
        keys, values = (repeated(t, x, groups, q, copies=True) for x in (k, v))
        frame.local(q, keys, values, scaled_q)
        alone = groups == 1 and keys.axes[1] is not q.axes[1] and single_head(t, keys)
        dense_keys = not alone and (contiguous or groups != 1)
        weights = _math_scores(t, scaled_q, keys, alone, contiguous, dense_keys)
        if bias is not None:
            frame.local(bias)
            weights = _add_bias(t, weights, bias)
        weights = dropout(t, softmax(t, weights), dropout_p)
        frame.local(weights)
        if alone:
            values = expand_head(t, values, (*q.axes[:2], *values.axes[2:]))
        out = value_product(t, weights, dense_operand(t, values, dense=groups != 1))
        result = cast(t, out, dtype)
        frame.local(result)
        cast(t, weights, dtype)  # the probabilities are returned too, and dropped by the caller
    t.in_kernel = False
    return rows_first(t, result)


def _math_scores(
    t: Tape, q: Value, keys: Value, alone: bool, dense_q: bool, dense_keys: bool
) -> Value:
    """Products of scaled queries and scaled keys; `alone`: one key head, seen by all queries."""
    right = scale(t, keys)
    if alone:
        right = expand_head(t, right, (*q.axes[:2], *keys.axes[2:]))
    left, right = dense_operand(t, q, dense=dense_q), dense_operand(t, right, dense=dense_keys)
    return score_product(t, left, right, name=MATH_PATH_SINGLE if alone else MATH_PATH)


def _add_bias(t: Tape, weights: Value, bias: Value) -> Value:
    """Scores plus a bias, in place; a trained bias gets the sum of their gradient over the rows it
    was broadcast to."""
    out = add_(t, weights, Value(bias.tensor, weights.axes, bias.dtype))
    if bias.requires_grad:
        op, gradient = t.ops[-1], t.gradient_of(bias)
        out = Value(out.tensor, out.axes, out.dtype, True)
        op.inputs, op.outputs = (weights, bias), (out,)
        op.backward, op.gradients = ((ALLOC, gradient),), (*op.gradients, Gradient(bias, gradient))
        op.backward_costs = (Move(traffic(weights, bias)),)
    return out


def _causal_bias(t: Tape, length: Size, keys: Size) -> Value:
    """The additive fp32 mask that the math path makes for itself."""
    ones = constant(t, "ones", (length, keys), BOOL)
    triangle = constant(t, "causal triangle", (length, keys), BOOL)
    t.touch(ones.tensor)
    out = constant(t, "additive mask", (length, keys), FP32)
    t.touch(triangle.tensor)
    return out


def additive_mask(t: Tape, mask: Value, dtype: DType) -> Value:
    """convert_boolean_attn_mask: zeros and minus infinity for each row (attention.cpp); autocast
    casts an additive mask as it does queries (autocast_mode.h, lower_precision_fp)."""
    if mask.dtype is not BOOL:
        return cast(t, mask, dtype)
    with t.scope():
        out = constant(t, "additive mask", mask.axes, dtype)
        inverted = constant(t, "inverted mask", mask.axes, BOOL)
        t.touch(mask.tensor, out.tensor, inverted.tensor)
        return out


def repeated(t: Tape, x: Value, groups: Size, q: Value, *, copies: bool = False) -> Value:
    """Keys or values with a head for each of q's."""
    return repeat_heads(t, x, groups, (x.axes[0], q.axes[1], *x.axes[2:]), copies=copies)
