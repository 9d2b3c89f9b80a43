"""Attention over q, k, v of axes (rows, heads, length, head size): the kernels SDPA can pick, and
transformers' eager chain."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import Size, ceil_div, minimum, round_up_to
from napkinmath.ir.costs import AttentionCost, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.index import slice_of
from napkinmath.ops.nodes import freed, gradients_of, made, meanwhile, result
from napkinmath.ops.whole_scores import additive_mask, math_attention, repeated


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
    masked = mask is not None
    size = v.axes[-1]
    grouped = groups != 1 and takes_groups(t, size, masked=masked)
    with t.scope() as frame:
        if groups != 1 and not grouped:  # transformers' own function, before autocast casts them
            k, v, groups = repeated(t, k, groups, q), repeated(t, v, groups, q), 1
            frame.local(k, v)
        q, k, v = (cast(t, x, t.policy.attended_dtype(x.dtype)) for x in (q, k, v))
        return _attended(
            t,
            q,
            k,
            v,
            groups=groups,
            grouped=grouped,
            mask=mask,
            causal=causal,
            window=window,
            dropout_p=dropout_p,
            contiguous=contiguous,
        )


def _attended(
    t: Tape,
    q: Value,
    k: Value,
    v: Value,
    *,
    groups: Size,
    grouped: bool,
    mask: Value | None,
    causal: bool,
    window: Size | None,
    dropout_p: float,
    contiguous: bool,
) -> Value:
    """The kernel, of values in the type that it runs in."""
    masked, size = mask is not None, v.axes[-1]
    kernel = t.policy.sdpa_kernel(q.dtype, head_size=t.known(size), masked=masked, grouped=grouped)
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
    if pads_heads(t, kernel, size):
        q, k, v = (_padded(t, x) for x in (q, k, v))
        out = _by_kernel(t, kernel, q, k, v, mask=mask, causal=causal, window=window)
        return copy(t, slice_of(t, out, (*out.axes[:-1], size)))
    out = _by_kernel(t, kernel, q, k, v, mask=mask, causal=causal, window=window)
    # the output is laid out as q is: at::empty_like(q) in flash_api.cpp mha_fwd
    return copy(t, out) if contiguous and kernel != "efficient" else out


def takes_groups(t: Tape, head_size: Size, *, masked: bool) -> bool:
    """Whether SDPA is handed grouped heads as they are (transformers use_gqa_in_sdpa), or kernels
    in its place are."""
    patch = t.policy.patch
    if patch is not None and patch.repeats_keys and t.policy.sdpa_choice.value == "efficient":
        return False
    return not masked and t.known(head_size) <= 256


def pads_heads(t: Tape, kernel: str, head_size: Size) -> bool:
    """Whether SDPA pads heads for flash, which reads multiples of 8 (attention.cpp
    pad_last_dim)."""
    return kernel == "flash" and t.known(head_size) % 8 != 0


def _by_kernel(
    t: Tape,
    kernel: str,
    q: Value,
    k: Value,
    v: Value,
    *,
    mask: Value | None,
    causal: bool,
    window: Size | None,
) -> Value:
    if mask is None:
        return fused(t, kernel, q, k, v, causal=causal, window=window)
    given = bias = additive_mask(t, mask, q.dtype)
    if kernel == "efficient":
        bias = _aligned(t, given)
    bias = _expanded(t, q, k, bias)
    out = fused(t, kernel, q, k, v, bias=bias, causal=False, window=window)
    t.touch(given.tensor, bias.tensor)
    return out


def _aligned(t: Tape, bias: Value) -> Value:
    """The bias with rows that start on a multiple of 8: a slice of a wider copy where the keys are
    none (attention.cpp preprocess_mask, pad_bias)."""
    if t.divides(8, bias.axes[-1]):
        return bias
    return slice_of(t, _padded(t, bias), bias.axes)


def _expanded(t: Tape, q: Value, k: Value, bias: Value) -> Value:
    """A bias that several rows or heads share: an expanded view, whose gradient is summed by a node
    of its own, once the kernel's has let go of what it kept (attention.cpp preprocess_mask)."""
    rows, heads, s_q, _ = q.axes
    shared = bias.axes[0] is not rows and t.at_least("b", 2)
    if not bias.requires_grad or (not shared and bias.axes[1] is heads):
        return bias
    return t.view(bias, (rows, heads, s_q, k.axes[2]), "expand", copies_gradient=True)


def _padded(t: Tape, x: Value) -> Value:
    """`F.pad` of the last axis to a multiple of 8; the gradient is cut out again
    (constant_pad_nd)."""
    wide, moved = (*x.axes[:-1], round_up_to(x.axes[-1], 8)), Move(2 * traffic(x))
    return t.op(
        "pad",
        (x,),
        wide,
        x.dtype,
        gradients=(LIKE,),
        costs=(moved,),
        backward_costs=(moved,),
    )


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
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    out = result(t, "attention output", (rows, s_q, heads, v.axes[3]), q.dtype, inputs)
    padded = round_up_to(s_q, 32) if kernel == "efficient" else s_q
    seeds = (t.tensor(n, (1,), INT64) for n in ("philox seed", "philox offset"))
    statistics = (t.tensor("log-sum-exp", (rows, heads, padded), FP32), *seeds)
    gradients = gradients_of(t, inputs)
    if bias is not None and bias.requires_grad:
        of_bias = Gradient(bias, _whole_gradient(t, q, k))
        of_bias.cut = not t.divides(16, k.axes[2])
        gradients = (*gradients[:-1], of_bias)
    forward_cost, backward_cost = _costs(t, kernel, q, k, causal=causal, window=window)
    needed = out.requires_grad
    t.append(
        f"sdpa {kernel}",
        inputs,
        (out,),
        forward=(*made(out.tensor, *statistics), *(() if needed else freed(*statistics))),
        saves=(*(x.tensor for x in (*inputs, out)), *statistics),
        costs=(forward_cost,),
        backward=_fused_backward(t, kernel, q, k, bias, gradients) if needed else (),
        gradients=gradients,
        backward_costs=(backward_cost,) if needed else (),
    )
    if needed:
        t.touch(*statistics)
    return out


def _fused_backward(
    t: Tape, kernel: str, q: Value, k: Value, bias: Value | None, gradients: tuple[Gradient, ...]
) -> Steps:
    temporaries: list[Tensor] = []
    if kernel == "efficient":
        temporaries = _efficient_workspace(t, q)
    elif kernel == "flash":
        temporaries = _flash_workspace(t, q, k)
    backward = (
        *made(*(g.tensor for g in gradients if g.of is not bias)),
        *meanwhile(*temporaries),
    )
    if bias is None or not bias.requires_grad:
        return backward
    return (*backward[:3], *made(gradients[-1].tensor), *backward[3:])


def _whole_gradient(t: Tape, q: Value, k: Value) -> Tensor:
    """A bias's gradient as the kernel writes it: for every row and head, in rows of 16."""
    axes = (*q.axes[:3], round_up_to(k.axes[2], 16))
    return t.tensor("grad of the bias", axes, q.dtype, Role.WORKSPACE)


def _costs(
    t: Tape, kernel: str, q: Value, k: Value, *, causal: bool, window: Size | None
) -> tuple[AttentionCost, AttentionCost]:
    """The kernel's work forward and backward; packed sequences see only themselves: heads of one
    shorter row, as many as hold the same tokens."""
    rows, heads, s_q, size = q.axes
    kv_heads, s_kv, packed = k.axes[1], k.axes[2], t.policy.packed_length
    if packed and s_q is s_kv:
        heads, kv_heads = (
            (rows * s_q * count + packed // 2) // packed for count in (heads, kv_heads)
        )
        rows, s_q, s_kv = 1, packed, packed
    shape = (rows, heads, kv_heads, s_q, s_kv, size)
    forward, backward = (
        AttentionCost(kernel, *shape, causal=causal, window=window, dtype=q.dtype, backward=back)
        for back in (False, True)
    )
    return forward, backward


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
