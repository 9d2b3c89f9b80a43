"""Attention over q, k, v of axes (rows, heads, length, head size): the kernels SDPA can pick, and transformers' eager chain."""

from __future__ import annotations

from napkinmath.costs import Attention, Move, traffic
from napkinmath.dtypes import FP32, INT64
from napkinmath.expr import Size, round_up_to
from napkinmath.ledger import ALLOC, FREE, Gradient, Role, Value
from napkinmath.ops.elementwise import add, cast, copy, dropout, scale, softmax
from napkinmath.ops.index import repeat_heads
from napkinmath.ops.matmul import bmm
from napkinmath.tape import Tape


def sdpa(t: Tape, q: Value, k: Value, v: Value, *, groups: Size, mask: Value | None = None, causal: bool = True, window: Size | None = None, dropout_p: float = 0.0) -> Value:
    """`scaled_dot_product_attention` with the kernel that the policy says CUDA picks; returns axes (rows, length, heads, head size)."""
    if t.policy.autocast is not None:
        q, k, v = (cast(t, x, t.policy.autocast) for x in (q, k, v))
    kernel = t.policy.sdpa_kernel(q.dtype, head_size=q.axes[-1], masked=mask is not None, grouped=groups != 1)
    if kernel == "math":
        return math_attention(t, q, k, v, groups=groups, mask=mask, dropout_p=dropout_p)
    if groups != 1 and (kernel == "efficient" or mask is not None):
        k, v = repeat_heads(t, k, groups, _expanded(q, k)), repeat_heads(t, v, groups, _expanded(q, v))
    return fused(t, kernel, q, k, v, causal=causal, window=window)


def _expanded(q: Value, k: Value) -> tuple[Size, ...]:
    return (k.axes[0], q.axes[1], k.axes[2], k.axes[3])


def fused(t: Tape, kernel: str, q: Value, k: Value, v: Value, *, causal: bool, window: Size | None) -> Value:
    """One fused kernel (flash, efficient, cudnn): keeps q, k, v, the output and the fp32 log-sum-exp of each row.

    Backward of flash accumulates dq in fp32 over rows rounded to 128 and head size to 32, and with grouped heads writes dk
    and dv per query head before summing. Source: flash-attention csrc/flash_attn/flash_api.cpp mha_bwd; torch
    aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    rows, heads, s_q, size = q.axes
    s_kv, kv_heads, v_size = k.axes[2], k.axes[1], v.axes[3]
    axes = (rows, s_q, heads, v_size)
    tensor = t.tensor("attention output", axes, q.dtype)
    lse = t.tensor("log-sum-exp", (rows, heads, round_up_to(s_q, 32) if kernel == "efficient" else s_q), FP32)
    seeds = tuple(t.tensor(n, (1,), INT64) for n in ("philox seed", "philox offset"))
    out = Value(tensor, axes, q.dtype, any(x.requires_grad for x in (q, k, v)))
    forward = ((ALLOC, tensor), (ALLOC, lse), *((ALLOC, x) for x in seeds))
    cost = Attention(kernel, rows, heads, kv_heads, s_q, s_kv, size, causal=causal, window=window, dtype=q.dtype, backward=False)
    if not out.requires_grad:
        t.append(f"sdpa {kernel}", (q, k, v), (out,), forward=(*forward, *((FREE, x) for x in (lse, *seeds))), costs=(cost,))
        return out
    gradients = tuple(Gradient(x, t.gradient_of(x)) for x in (q, k, v))
    accumulator = t.tensor("dq accumulator", (rows, heads, round_up_to(s_q, 128), round_up_to(size, 32)), FP32, Role.WORKSPACE)
    delta = t.tensor("row sums of dO*O", (rows, heads, round_up_to(s_q, 128)), FP32, Role.WORKSPACE)
    temporaries = [delta, accumulator]
    if kernel != "efficient" and kv_heads is not heads:
        temporaries += [t.tensor(f"{n} per query head", (rows, s_kv, heads, size), q.dtype, Role.WORKSPACE) for n in ("dk", "dv")]
    backward = (*((ALLOC, g.tensor) for g in gradients if g.tensor), *((ALLOC, x) for x in temporaries), *((FREE, x) for x in temporaries))
    backward_cost = Attention(kernel, rows, heads, kv_heads, s_q, s_kv, size, causal=causal, window=window, dtype=q.dtype, backward=True)
    t.append(f"sdpa {kernel}", (q, k, v), (out,), forward=forward, saves=(q.tensor, k.tensor, v.tensor, tensor, lse, *seeds), costs=(cost,), backward=backward, gradients=gradients, backward_costs=(backward_cost,))  # fmt: skip
    for x in (lse, *seeds):
        t.last_use[x] = len(t.ops) - 1
    return out


def eager_attention(t: Tape, q: Value, k: Value, v: Value, *, groups: Size, mask: Value | None, dropout_p: float = 0.0, scaled: bool = True) -> Value:
    """transformers' eager_attention_forward: scores in the model's type, softmax in fp32, every step a tensor of b·a·s².

    Source: transformers 5.23 models/llama/modeling_llama.py eager_attention_forward.
    """
    rows, heads, s_q, size = q.axes
    s_kv, scores = k.axes[2], (rows, heads, s_q, k.axes[2])
    with t.scope() as frame:
        keys, values = repeat_heads(t, k, groups, _expanded(q, k)), repeat_heads(t, v, groups, _expanded(q, v))
        frame.local(keys, values)
        weights = bmm(t, q, keys, rows * heads, s_q, s_kv, size, scores, name="q k^T")
        if scaled:
            weights = scale(t, weights)
        if mask is not None:
            weights = add(t, weights, Value(mask.tensor, scores, mask.dtype))
        weights = cast(t, softmax(t, weights, dtype=FP32), q.dtype)
        weights = dropout(t, weights, dropout_p)
        frame.local(weights)
        out = bmm(t, weights, values, rows * heads, s_q, v.axes[3], s_kv, (rows, heads, s_q, v.axes[3]), name="scores v")
        return copy(t, out, (rows, s_q, heads, v.axes[3]))


def math_attention(t: Tape, q: Value, k: Value, v: Value, *, groups: Size, mask: Value | None, dropout_p: float = 0.0) -> Value:
    """SDPA's math path: keys and values expanded, q and k scaled into copies, scores and probabilities kept.

    Source: aten/src/ATen/native/transformers/attention.cpp _scaled_dot_product_attention_math.
    """
    rows, heads, s_q, size = q.axes
    s_kv, scores = k.axes[2], (rows, heads, s_q, k.axes[2])
    dtype = q.dtype
    q, k, v = (cast(t, x, FP32) for x in (q, k, v))  # reduced-precision reductions are off by default
    keys, values = repeat_heads(t, k, groups, _expanded(q, k)), repeat_heads(t, v, groups, _expanded(q, v))
    weights = bmm(t, scale(t, q), scale(t, keys), rows * heads, s_q, s_kv, size, scores, name="q k^T")
    if mask is not None:
        weights = add(t, weights, Value(mask.tensor, scores, mask.dtype))
    weights = dropout(t, softmax(t, weights), dropout_p)
    out = bmm(t, weights, values, rows * heads, s_q, v.axes[3], s_kv, (rows, heads, s_q, v.axes[3]), name="scores v")
    return copy(t, cast(t, out, dtype), (rows, s_q, heads, v.axes[3]))


def mask_traffic(x: Value) -> Move:
    """Cost of reading a mask once."""
    return Move(traffic(x))
