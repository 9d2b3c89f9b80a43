"""Triton kernel of rotary position embedding: q and k of one token in one program, in place or not,
forward or transposed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Shipped, launch, next_power_of_2

# : Values of one half of a program's query heads that a warp takes: 16 a thread, two accesses of 16
# bytes.
VALUES_PER_WARP = 512


def _warps(tile: int) -> int:
    """Warps for a tile of heads x half a head: one for 4 heads of 256, 8 for 128 of 128, which
    would spill in 4 and in 16."""
    return max(1, min(8, tile // VALUES_PER_WARP))


@triton.jit
def _rotate(
    x_ptr,
    y_ptr,
    x_head_stride,
    y_head_stride,
    heads,
    first,
    second,
    cos1,
    cos2,
    sin1,
    sin2,
    half_mask,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    head = tl.arange(0, HEADS)[:, None].to(
        tl.int64
    )  # heads that lie a whole sequence apart pass 2^31
    mask = (head < heads) & half_mask
    x1 = tl.load(x_ptr + head * x_head_stride + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + head * x_head_stride + second, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    tl.store(y_ptr + head * y_head_stride + first, y1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + head * y_head_stride + second, y2.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    q_out_batch_stride,
    q_out_head_stride,
    q_out_token_stride,
    k_out_batch_stride,
    k_out_head_stride,
    k_out_token_stride,
    cos_batch_stride,
    cos_token_stride,
    q_heads,
    k_heads,
    half,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """y1 = x1 cos1 - x2 sin1, y2 = x2 cos2 + x1 sin2 over the two halves of a head; INVERSE is the
    transpose, the gradient."""
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    half_mask = column < half
    at = batch * cos_batch_stride + token * cos_token_stride + column
    cos1 = tl.load(cos_ptr + at, mask=half_mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + at + half, mask=half_mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + at, mask=half_mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + at + half, mask=half_mask, other=0.0).to(tl.float32)
    q_start = q_ptr + batch * q_batch_stride + token * q_token_stride
    q_out = q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride
    second = column + half
    _rotate(
        q_start,
        q_out,
        q_head_stride,
        q_out_head_stride,
        q_heads,
        column,
        second,
        cos1,
        cos2,
        sin1,
        sin2,
        half_mask,
        Q_HEADS,
        INVERSE,
    )
    k_start = k_ptr + batch * k_batch_stride + token * k_token_stride
    k_out = k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride
    _rotate(
        k_start,
        k_out,
        k_head_stride,
        k_out_head_stride,
        k_heads,
        column,
        second,
        cos1,
        cos2,
        sin1,
        sin2,
        half_mask,
        K_HEADS,
        INVERSE,
    )


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
) -> None:
    """Writes the rotated halves of q and k (batch, heads, tokens, head size; last dimension
    contiguous); out may be in."""
    half = cos.shape[-1] // 2
    tile = next_power_of_2(max(q.shape[1], k.shape[1])) * next_power_of_2(half)
    cos_batch_stride = cos.stride(0) if cos.shape[0] > 1 else 0
    launch(
        _rope,
        (q.shape[2], q.shape[0]),
        q,
        k,
        q_out,
        k_out,
        cos,
        sin,
        *q.stride()[:3],
        *k.stride()[:3],
        *q_out.stride()[:3],
        *k_out.stride()[:3],
        cos_batch_stride,
        cos.stride(1),
        q.shape[1],
        k.shape[1],
        half,
        Q_HEADS=next_power_of_2(q.shape[1]),
        K_HEADS=next_power_of_2(k.shape[1]),
        HALF=next_power_of_2(half),
        INVERSE=inverse,
        num_warps=_warps(tile),
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    """Head counts of models from 8B to 405B, head sizes 64, 128 and 256."""
    return [
        Shipped(
            f"rope q={q_heads} k={k_heads} d={2 * half}",
            _rope,
            {"Q_HEADS": q_heads, "K_HEADS": k_heads, "HALF": half, "INVERSE": False},
            _warps(max(q_heads, k_heads) * half),
            1,
            aligned=("half",),
        )
        for q_heads, k_heads, half in (
            (32, 8, 32),
            (32, 8, 64),
            (64, 8, 64),
            (128, 8, 64),
            (32, 32, 64),
            (16, 8, 128),
            (4, 1, 128),
        )
    ]
