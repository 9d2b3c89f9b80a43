"""Attention over q, k, v of axes (rows, heads, length, head size): the kernels SDPA can pick, and
transformers' eager chain."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64, DType
from napkinmath.base.expr import Size, ceil_div, minimum, round_up_to
from napkinmath.ir.costs import Attention, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import add, add_, cast, copy, dropout, scale, softmax, tanh
from napkinmath.ops.index import constant, expand_head, repeat_heads, single_head
from napkinmath.ops.matmul import bmm

# Names of the products of SDPA's math path, by which reports know it: heads as they are, or one
# head broadcast to all queries.
MATH_PATH, MATH_PATH_SINGLE = "q k^T of math path", "q k^T of math path, one key head"


def sdpa(
    t: Tape,
    q: Value,
    k: Value,
    v: Value,
    *,
    groups: Size,
    mask: Value | None = None,
    causal: bool = True,
    window: Size | None = None,
    dropout_p: float = 0.0,
    contiguous: bool = False,
) -> Value:
    """`scaled_dot_product_attention` with the kernel that the policy says CUDA picks; returns axes
    (rows, length, heads, head size)."""
    q, k, v = (cast(t, x, t.policy.attended_dtype(x.dtype)) for x in (q, k, v))
    kernel = t.policy.sdpa_kernel(
        q.dtype, head_size=q.axes[-1], masked=mask is not None, grouped=groups != 1
    )
    if (
        groups != 1 and mask is not None
    ):  # transformers' use_gqa_in_sdpa: grouped heads are SDPA's own only without a mask
        k, v = (
            repeat_heads(t, k, groups, _expanded(q, k)),
            repeat_heads(t, v, groups, _expanded(q, v)),
        )
        groups = 1
    if kernel == "math":
        return math_attention(
            t,
            q,
            k,
            v,
            groups=groups,
            mask=mask,
            causal=causal,
            dropout_p=dropout_p,
            contiguous=contiguous,
        )
    bias = _additive_mask(t, mask, q.dtype) if mask is not None else None
    out = fused(t, kernel, q, k, v, bias=bias, causal=causal and mask is None, window=window)
    if bias is not None:
        t.touch(bias.tensor)
    if (
        contiguous and kernel != "efficient"
    ):  # the output is laid out as q is: at::empty_like(q) in flash_api.cpp mha_fwd
        out = copy(t, out)
    return out


def _additive_mask(t: Tape, mask: Value, dtype: DType) -> Value:
    """convert_boolean_attn_mask: zeros and minus infinity for each row (attention.cpp); an additive
    mask stays as it is."""
    if mask.dtype is not BOOL:
        return mask
    with t.scope():
        out = constant(t, "additive mask", mask.axes, dtype)
        inverted = constant(t, "inverted mask", mask.axes, BOOL)
        t.touch(mask.tensor, out.tensor, inverted.tensor)
        return out


def _expanded(q: Value, k: Value) -> tuple[Size, ...]:
    return (k.axes[0], q.axes[1], k.axes[2], k.axes[3])


def fused(
    t: Tape,
    kernel: str,
    q: Value,
    k: Value,
    v: Value,
    *,
    causal: bool,
    window: Size | None,
    bias: Value | None = None,
) -> Value:
    """One fused kernel over whole sequences, of which other ranks may hold parts."""
    context = t.policy.context
    if context is not None:
        return context.attention(t, kernel, q, k, v, causal=causal, window=window)
    return fused_on_rank(t, kernel, q, k, v, causal=causal, window=window, bias=bias)


def fused_on_rank(
    t: Tape,
    kernel: str,
    q: Value,
    k: Value,
    v: Value,
    *,
    causal: bool,
    window: Size | None,
    bias: Value | None = None,
) -> Value:
    """One fused kernel (flash, efficient, cudnn): keeps q, k, v, the output and the fp32
    log-sum-exp of each row.

    Backward of flash accumulates dq in fp32 over rows rounded to 128 and head size to 32, and with
    grouped heads writes dk and dv per query head before summing. Source: flash-attention
    csrc/flash_attn/flash_api.cpp mha_bwd; torch
    aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    rows, heads, s_q, _ = q.axes
    s_kv, v_size = k.axes[2], v.axes[3]
    axes = (rows, s_q, heads, v_size)
    tensor = t.tensor("attention output", axes, q.dtype)
    lse = t.tensor(
        "log-sum-exp", (rows, heads, round_up_to(s_q, 32) if kernel == "efficient" else s_q), FP32
    )
    seeds = tuple(t.tensor(n, (1,), INT64) for n in ("philox seed", "philox offset"))
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    out = Value(tensor, axes, q.dtype, any(x.requires_grad for x in inputs))
    forward = ((ALLOC, tensor), (ALLOC, lse), *((ALLOC, x) for x in seeds))
    cost = _cost(t, kernel, q, k, causal=causal, window=window, backward=False)
    if not out.requires_grad:
        t.append(
            f"sdpa {kernel}",
            inputs,
            (out,),
            forward=(*forward, *((FREE, x) for x in (lse, *seeds))),
            costs=(cost,),
        )
        return out
    made = [(x, t.gradient_of(x)) for x in inputs if x.requires_grad]
    gradients = tuple(Gradient(x, gradient) for x, gradient in made)
    temporaries = (
        _efficient_workspace(t, q)
        if kernel == "efficient"
        else _flash_workspace(t, q, k)
        if kernel == "flash"
        else []
    )
    backward: Steps = (
        *((ALLOC, gradient) for x, gradient in made if x is not bias),
        *((ALLOC, x) for x in temporaries),
        *((FREE, x) for x in temporaries),
    )
    if (
        bias is not None and bias.requires_grad
    ):  # the kernel writes it for every row and head; it is then summed to the bias's own axes
        whole = t.tensor(
            "grad of the bias before the sum", (rows, heads, s_q, s_kv), q.dtype, Role.WORKSPACE
        )
        backward = (
            *backward[:3],
            (ALLOC, whole),
            *backward[3:],
            (ALLOC, made[-1][1]),
            (FREE, whole),
        )
    backward_cost = _cost(t, kernel, q, k, causal=causal, window=window, backward=True)
    t.append(
        f"sdpa {kernel}",
        inputs,
        (out,),
        forward=forward,
        saves=(
            q.tensor,
            k.tensor,
            v.tensor,
            *((bias.tensor,) if bias is not None else ()),
            tensor,
            lse,
            *seeds,
        ),
        costs=(cost,),
        backward=backward,
        gradients=gradients,
        backward_costs=(backward_cost,),
    )
    for x in (lse, *seeds):
        t.last_use[x] = len(t.ops) - 1
    return out


def _cost(
    t: Tape, kernel: str, q: Value, k: Value, *, causal: bool, window: Size | None, backward: bool
) -> Attention:
    """The kernel's work; packed sequences see only themselves: heads of one shorter row, as many as
    hold the same tokens."""
    rows, heads, s_q, size = q.axes
    kv_heads, s_kv, packed = k.axes[1], k.axes[2], t.policy.packed_length
    if packed and s_q is s_kv:
        heads, kv_heads = (
            (rows * s_q * count + packed // 2) // packed for count in (heads, kv_heads)
        )
        rows, s_q, s_kv = 1, packed, packed
    return Attention(
        kernel,
        rows,
        heads,
        kv_heads,
        s_q,
        s_kv,
        size,
        causal=causal,
        window=window,
        dtype=q.dtype,
        backward=backward,
    )


def _flash_workspace(t: Tape, q: Value, k: Value) -> list[Tensor]:
    """Row sums and the fp32 accumulator of dq; with grouped heads also dk and dv per query head
    (flash_api.cpp mha_bwd)."""
    rows, heads, s_q, size = q.axes
    lane = 32 * minimum(2, ceil_div(size, 128))
    made = [
        t.tensor("row sums of dO*O", (rows, heads, round_up_to(s_q, 128)), FP32, Role.WORKSPACE),
        t.tensor(
            "dq accumulator",
            (rows, heads, round_up_to(s_q, 128), ceil_div(size, lane) * lane),
            FP32,
            Role.WORKSPACE,
        ),
    ]
    if k.axes[1] is not heads:
        made += [
            t.tensor(f"{n} per query head", (rows, k.axes[2], heads, size), q.dtype, Role.WORKSPACE)
            for n in ("dk", "dv")
        ]
    return made


def _efficient_workspace(t: Tape, q: Value) -> list[Tensor]:
    """Row sums, and dq staged in fp32 tiles of 64 (128 for head sizes above 64), each with a lock
    of 16 bytes.

    Source: attention_backward.cu (delta, workspace) and mem_eff_attention/kernel_backward.h
    GradQTempStorage.
    """
    rows, heads, s_q, size = q.axes
    tile = 64 * minimum(2, ceil_div(size, 64))
    tiles = ceil_div(s_q, tile) * ceil_div(size, tile)
    return [
        t.tensor("row sums of dO*O", (rows, heads, s_q), FP32, Role.WORKSPACE),
        t.tensor("dq staging", (rows, heads, tiles, tile * tile + 4), FP32, Role.WORKSPACE),
    ]


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
            repeat_heads(t, k, groups, _expanded(q, k)),
            repeat_heads(t, v, groups, _expanded(q, v)),
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
            mask = _additive_mask(t, mask, dtype)
            frame.local(mask)
        q, k, v = (
            cast(t, x, FP32) for x in (q, k, v)
        )  # reduced-precision reductions are off by default
        scaled_q = scale(t, q)
        bias = mask if mask is not None or not causal else _causal_bias(t, s_q, s_kv)
        keys, values = (
            repeat_heads(t, k, groups, _expanded(q, k), copies=True),
            repeat_heads(t, v, groups, _expanded(q, v), copies=True),
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
