"""Triton kernel of the cross-entropy of a chunk of logits, which it overwrites with their
gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Shipped, cdiv, launch, next_power_of_2

MAX_BLOCK = 8192
# : Few, wide programs: rows in flight are read a second time, and fewer of them stay in the level-2
# cache.
NUM_WARPS = 16
SCALE_BLOCK, SCALE_WARPS = 2048, 8


@triton.jit
def _tanh(x):
    """tanh to fp32 accuracy: the exponential form loses small arguments to cancellation, so those
    take its series."""
    square = x * x
    series = x * (
        1.0
        + square
        * (-0.3333333333333333 + square * (0.13333333333333333 + square * -0.053968253968253971))
    )
    magnitude = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    return tl.where(magnitude < 0.1, series, tl.where(x < 0, -large, large))


@triton.jit
def _logits(start, columns, stride, softcap, HAS_SOFTCAP: tl.constexpr, LAST: tl.constexpr):
    """Of a block of a row in fp32, soft-capped if asked; only the LAST one may reach past the row."""
    if LAST:
        logit = tl.load(start + columns, mask=columns < stride, other=0.0).to(tl.float32)
    else:
        logit = tl.load(start + columns).to(tl.float32)
    if HAS_SOFTCAP:
        logit = softcap * _tanh(logit / softcap)
    return logit


@triton.jit
def _with_block(
    start,
    first,
    stride,
    vocabulary,
    softcap,
    largest,
    total,
    logit_sum,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(largest logit, sum of exp(logit - largest), sum of logits) with those of one more block."""
    columns = first + tl.arange(0, BLOCK)
    logit = _logits(start, columns, stride, softcap, HAS_SOFTCAP, LAST)
    if HAS_SMOOTHING:
        known = tl.where(columns < vocabulary, logit, 0.0) if LAST else logit
        logit_sum += tl.sum(known, 0)
    if LAST:
        logit = tl.where(columns < vocabulary, logit, float("-inf"))
    bigger = tl.maximum(largest, tl.max(logit, 0))
    # nothing finite yet: -inf - -inf would be NaN
    reference = tl.where(bigger == float("-inf"), 0.0, bigger)
    total = total * tl.exp(largest - reference) + tl.sum(tl.exp(logit - reference), 0)
    return bigger, total, logit_sum


@triton.jit
def _write_block(
    start,
    first,
    stride,
    vocabulary,
    target,
    softcap,
    smoothing,
    largest,
    weight,
    scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logits of a block become scale * d loss / d logit."""
    columns = first + tl.arange(0, BLOCK)
    logit = _logits(start, columns, stride, softcap, False, LAST)
    slope = 1.0
    if HAS_SOFTCAP:
        bent = _tanh(logit / softcap)
        slope = 1.0 - bent * bent
        logit = softcap * bent
    gradient = weight * tl.exp(logit - largest)
    if HAS_SMOOTHING:
        gradient -= smoothing / vocabulary
    gradient -= tl.where(columns == target, 1.0 - smoothing, 0.0)
    gradient *= slope * scale
    if LAST:
        # zero in the padding: a GEMM may read it, and times zero a NaN stays one
        gradient = tl.where(columns < vocabulary, gradient, 0.0)
        tl.store(start + columns, gradient.to(start.dtype.element_ty), mask=columns < stride)
    else:
        tl.store(start + columns, gradient.to(start.dtype.element_ty))


@triton.jit
def _cross_entropy(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    scale_ptr,
    logits_stride,
    vocabulary,
    softcap,
    smoothing,
    z_weight,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """loss = (1 - e) (lse - s_t) + e (lse - mean s) + z lse^2, with s = cap tanh(x / cap); logits
    become scale * d loss / d x.

    A row is padded to logits_stride, a multiple of 64, so that loads and stores stay 16 bytes wide
    for any vocabulary; what is in the padding is read and written, and means nothing. Whole blocks
    come first and ask no column whether it is inside.
    """
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * logits_stride
    target = tl.load(targets_ptr + row)
    inside = (target >= 0) & (target < vocabulary)
    target_logit = tl.load(start + tl.where(inside, target, 0)).to(tl.float32)
    if HAS_SOFTCAP:
        target_logit = softcap * _tanh(target_logit / softcap)
    whole = vocabulary // BLOCK * BLOCK
    largest = float("-inf")
    total = 0.0
    logit_sum = 0.0
    # fmt: off
    for first in range(0, whole, BLOCK):
        largest, total, logit_sum = _with_block(
            start, first, logits_stride, vocabulary, softcap, largest, total, logit_sum,
            HAS_SOFTCAP, HAS_SMOOTHING, False, BLOCK,
        )
    if whole < vocabulary:
        largest, total, logit_sum = _with_block(
            start, whole, logits_stride, vocabulary, softcap, largest, total, logit_sum,
            HAS_SOFTCAP, HAS_SMOOTHING, True, BLOCK,
        )
    # fmt: on
    log_sum = largest + tl.log(total)
    loss = log_sum - (1.0 - smoothing) * target_logit + z_weight * log_sum * log_sum
    if HAS_SMOOTHING:
        loss -= smoothing * logit_sum / vocabulary
    tl.store(losses_ptr + row, tl.where(inside, loss, float("nan")))
    if GRADIENT:
        scale = tl.load(scale_ptr)
        # exp(logit - lse) would carry lse's rounding into every value
        weight = (1.0 + 2.0 * z_weight * log_sum) / total
        # fmt: off
        for first in range(0, whole, BLOCK):
            _write_block(
                start, first, logits_stride, vocabulary, target, softcap, smoothing, largest,
                weight, scale, HAS_SOFTCAP, HAS_SMOOTHING, False, BLOCK,
            )
        if whole < vocabulary:
            _write_block(
                start, whole, logits_stride, vocabulary, target, softcap, smoothing, largest,
                weight, scale, HAS_SOFTCAP, HAS_SMOOTHING, True, BLOCK,
            )
        # fmt: on


def _max_block(has_softcap: bool) -> int:
    return (
        MAX_BLOCK // 2 if has_softcap else MAX_BLOCK
    )  # tanh needs more registers: 8,192 spills on sm_90


def cross_entropy_of_chunk(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    scale: torch.Tensor,
    softcap: float,
    smoothing: float,
    z_weight: float,
    gradient: bool,
) -> None:
    """Writes the rows' losses and, if `gradient`, replaces the logits (rows, vocabulary) by scale
    times their gradient."""
    rows, vocabulary = logits.shape
    launch(
        _cross_entropy,
        (rows,),
        logits,
        targets,
        losses,
        scale,
        logits.stride(0),
        vocabulary,
        softcap,
        smoothing,
        z_weight,
        HAS_SOFTCAP=softcap > 0,
        HAS_SMOOTHING=smoothing > 0,
        GRADIENT=gradient,
        BLOCK=min(_max_block(softcap > 0), next_power_of_2(vocabulary)),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


@triton.jit
def _scale(x_ptr, out_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    """out = factor x in fp32, rounded once: a factor rounded to x's type would be off by up to 0.4%
    in bf16, and 65,536 infinite in fp16."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=at < numel)


def scale(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Writes factor x into `out`; both contiguous, the factor one fp32 value."""
    grid = (cdiv(x.numel(), SCALE_BLOCK),)
    launch(
        _scale,
        grid,
        x,
        out,
        factor,
        x.numel(),
        BLOCK=SCALE_BLOCK,
        num_warps=SCALE_WARPS,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    """With and without soft-capping and smoothing; the scaling of the gradients in the backward."""
    more = {"factor_ptr": "*fp32", "numel": "i64"}
    found = [
        Shipped(
            "scale_gradient",
            _scale,
            {"BLOCK": SCALE_BLOCK},
            SCALE_WARPS,
            1,
            types=more,
            aligned=("numel",),
        )
    ]
    types = {
        "targets_ptr": "*i64",
        "losses_ptr": "*fp32",
        "scale_ptr": "*fp32",
        "softcap": "fp32",
        "smoothing": "fp32",
        "z_weight": "fp32",
    }
    return found + [
        Shipped(
            f"cross_entropy {name}",
            _cross_entropy,
            {
                "HAS_SOFTCAP": capped,
                "HAS_SMOOTHING": smoothed,
                "GRADIENT": True,
                "BLOCK": _max_block(capped),
            },
            NUM_WARPS,
            1,
            types=types,
        )
        for name, capped, smoothed in (
            ("plain", False, False),
            ("soft-capped", True, False),
            ("smoothed", False, True),
        )
    ]
