"""Attention over q, k, v of axes (rows, heads, length, head size): the kernels SDPA can pick, and
transformers' eager chain."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import Size, ceil_div, minimum, round_up_to
from napkinmath.ir.costs import Attention
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.index import repeat_heads
from napkinmath.ops.whole_scores import additive_mask, expanded, math_attention


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
            repeat_heads(t, k, groups, expanded(q, k)),
            repeat_heads(t, v, groups, expanded(q, v)),
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
    bias = additive_mask(t, mask, q.dtype) if mask is not None else None
    out = fused(t, kernel, q, k, v, bias=bias, causal=causal and mask is None, window=window)
    if bias is not None:
        t.touch(bias.tensor)
    if (
        contiguous and kernel != "efficient"
    ):  # the output is laid out as q is: at::empty_like(q) in flash_api.cpp mha_fwd
        out = copy(t, out)
    return out


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
