"""Attention that holds the whole matrix of scores: eager code, and the math path of SDPA."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import add, add_, cast, copy, dropout, scale, softmax, tanh
from napkinmath.ops.index import constant, expand_head, repeat_heads, single_head
from napkinmath.ops.matmul import bmm

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
    rows, heads, s_q, size = q.axes
    s_kv, scores = k.axes[2], (rows, heads, s_q, k.axes[2])
    with t.scope() as frame:
        keys, values = (
            repeat_heads(t, k, groups, expanded(q, k)),
            repeat_heads(t, v, groups, expanded(q, v)),
        )
        frame.local(keys, values)
        copied = groups != 1 and not single_head(t, k)
        left, right = (
            dense_operand(t, q, dense=contiguous),
            dense_operand(t, keys, dense=copied or (contiguous and groups == 1)),
        )
        weights = bmm(t, left, right, rows * heads, s_q, s_kv, size, scores, name="q k^T")
        if t.policy.stack.fused_softmax and not capped:
            weights = scaled_masked_softmax(t, weights)
        else:
            if scaled:
                weights = scale(t, weights)
            if capped:
                weights = scale(t, tanh(t, scale(t, weights)))
            if mask is not None:
                weights = add(t, weights, Value(mask.tensor, scores, mask.dtype))
            frame.local(weights)  # bound to its name until the softmax and its cast are done
            scored, weights = (
                weights,
                cast(t, softmax(t, weights, dtype=FP32 if fp32_softmax else None), q.dtype),
            )
            frame.release(scored)
        weights = dropout(t, weights, dropout_p)
        frame.local(weights)
        t.keep(weights)
        out = bmm(
            t,
            weights,
            dense_operand(t, values, dense=copied),
            rows * heads,
            s_q,
            v.axes[3],
            s_kv,
            (rows, heads, s_q, v.axes[3]),
            name="scores v",
        )
        return rows_first(t, out)


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
    rows, heads, s_q, size = q.axes
    s_kv, scores = k.axes[2], (rows, heads, s_q, k.axes[2])
    dtype = q.dtype
    with t.scope() as frame:
        frame.local(q, k, v)
        if mask is not None:
            mask = additive_mask(t, mask, dtype)
            frame.local(mask)
        q, k, v = (
            cast(t, x, FP32) for x in (q, k, v)
        )  # reduced-precision reductions are off by default
        scaled_q = scale(t, q)
        bias = mask if mask is not None or not causal else _causal_bias(t, s_q, s_kv)
        keys, values = (
            repeat_heads(t, k, groups, expanded(q, k), copies=True),
            repeat_heads(t, v, groups, expanded(q, v), copies=True),
        )
        frame.local(q, keys, values, scaled_q)
        alone = groups == 1 and keys.axes[1] is not heads and single_head(t, keys)
        right = scale(t, keys)
        if alone:
            right = expand_head(t, right, q.axes)
        left, right = (
            dense_operand(t, scaled_q, dense=contiguous),
            dense_operand(t, right, dense=not alone and (contiguous or groups != 1)),
        )
        weights = bmm(
            t,
            left,
            right,
            rows * heads,
            s_q,
            s_kv,
            size,
            scores,
            name=MATH_PATH_SINGLE if alone else MATH_PATH,
        )
        if bias is not None:
            frame.local(bias)
            weights = _add_bias(t, weights, bias)
        weights = dropout(t, softmax(t, weights), dropout_p)
        frame.local(weights)
        if alone:
            values = expand_head(t, values, q.axes)
        out = bmm(
            t,
            weights,
            dense_operand(t, values, dense=groups != 1),
            rows * heads,
            s_q,
            v.axes[3],
            s_kv,
            (rows, heads, s_q, v.axes[3]),
            name="scores v",
        )
        result = cast(t, out, dtype)
        frame.local(result)
        cast(t, weights, dtype)  # the probabilities are returned too, and dropped by the caller
    return rows_first(t, result)


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


def mask_traffic(x: Value) -> Move:
    """Cost of reading a mask once."""
    return Move(traffic(x))


def additive_mask(t: Tape, mask: Value, dtype: DType) -> Value:
    """convert_boolean_attn_mask: zeros and minus infinity for each row (attention.cpp); an additive
    mask stays as it is."""
    if mask.dtype is not BOOL:
        return mask
    with t.scope():
        out = constant(t, "additive mask", mask.axes, dtype)
        inverted = constant(t, "inverted mask", mask.axes, BOOL)
        t.touch(mask.tensor, out.tensor, inverted.tensor)
        return out


def expanded(q: Value, k: Value) -> tuple[Size, ...]:
    return (k.axes[0], q.axes[1], k.axes[2], k.axes[3])
