"""Triton kernels of the labels' log-probabilities over a chunk of logits, which become their gradient
in place, and of rows times a factor each.

Rows of logits are padded to a multiple of 64 columns, as in the cross-entropy's kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cross_entropy import NUM_WARPS, _max_block, _tanh
from .launch import Shipped, cdiv, launch, next_power_of_2

SCALE_BLOCK, SCALE_WARPS = 2048, 8


@triton.jit
def _bent(x, factor, softcap, HAS_SOFTCAP: tl.constexpr):
    """factor x, soft-capped if asked: what the temperature divides."""
    x = x * factor
    if HAS_SOFTCAP:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _write_gradient(
    start,
    target,
    largest,
    total,
    logits_stride,
    vocabulary,
    factor,
    softcap,
    inverse_temperature,
    slope,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of a row become slope times (1 at the target, less their share), through the cap."""
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        logit = tl.load(start + columns, mask=columns < logits_stride, other=0.0).to(tl.float32)
        bent = _bent(logit, factor, softcap, HAS_SOFTCAP)
        gradient = -tl.exp(bent * inverse_temperature - largest) / total
        gradient += tl.where(columns == target, 1.0, 0.0)
        if HAS_SOFTCAP:
            gradient *= 1.0 - (bent / softcap) * (bent / softcap)
        # zero in the padding: a GEMM may read it, and times zero a NaN stays one
        gradient = tl.where(columns < vocabulary, gradient * slope, 0.0)
        tl.store(
            start + columns,
            gradient.to(start.dtype.element_ty),
            mask=columns < logits_stride,
        )


@triton.jit
def _log_probabilities(
    logits_ptr,
    targets_ptr,
    log_probs_ptr,
    entropies_ptr,
    means_ptr,
    tops_ptr,
    upstream_ptr,
    logits_stride,
    vocabulary,
    factor,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_UPSTREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log p of the target under softmax(bent(x) / temperature); logits become its gradient, times
    the row's upstream gradient where there is one. A target outside gives NaN."""
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * logits_stride
    target = tl.load(targets_ptr + row)
    inside = (target >= 0) & (target < vocabulary)
    chosen = tl.load(start + tl.where(inside, target, 0)).to(tl.float32)
    chosen = _bent(chosen, factor, softcap, HAS_SOFTCAP) * inverse_temperature
    largest = float("-inf")
    before = float("-inf")
    total = 0.0
    weighted = 0.0
    logit_sum = 0.0
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        logit = tl.load(start + columns, mask=columns < logits_stride, other=0.0).to(tl.float32)
        logit = _bent(logit, factor, softcap, HAS_SOFTCAP) * inverse_temperature
        known = columns < vocabulary
        if STATISTICS:
            logit_sum += tl.sum(tl.where(known, logit, 0.0), 0)
            earlier = tl.where(known & (columns < target), logit, float("-inf"))
            before = tl.maximum(before, tl.max(earlier, 0))
        logit = tl.where(known, logit, float("-inf"))
        bigger = tl.maximum(largest, tl.max(logit, 0))
        # nothing finite yet: -inf - -inf would be NaN
        reference = tl.where(bigger == float("-inf"), 0.0, bigger)
        shrink = tl.exp(largest - reference)
        exponential = tl.exp(logit - reference)
        total = total * shrink + tl.sum(exponential, 0)
        if STATISTICS:
            # a masked word adds 0, and not 0 times -inf
            part = tl.where(exponential > 0.0, exponential * logit, 0.0)
            weighted = weighted * shrink + tl.sum(part, 0)
        largest = bigger
    log_total = tl.log(total)
    nothing = float("nan")
    # less the maximum first: a sum with it would round what is left
    tl.store(log_probs_ptr + row, tl.where(inside, (chosen - largest) - log_total, nothing))
    if STATISTICS:
        tl.store(entropies_ptr + row, log_total - (weighted / total - largest))
        tl.store(means_ptr + row, logit_sum / vocabulary)
        tl.store(tops_ptr + row, (chosen >= largest) & (chosen > before))
    if GRADIENT:
        slope = factor * inverse_temperature
        if HAS_UPSTREAM:
            slope *= tl.load(upstream_ptr + row)
        _write_gradient(
            start,
            target,
            largest,
            total,
            logits_stride,
            vocabulary,
            factor,
            softcap,
            inverse_temperature,
            slope,
            HAS_SOFTCAP,
            BLOCK,
        )


def log_probabilities_of_chunk(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_probs: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    upstream: torch.Tensor | None,
    factor: float,
    softcap: float,
    inverse_temperature: float,
    gradient: bool,
) -> None:
    """Writes the rows' log-probabilities and, if asked, entropies, mean logits and whether the
    target is the first maximum; with `gradient` the logits (rows, vocabulary) become it."""
    rows, vocabulary = logits.shape
    launch(
        _log_probabilities,
        (rows,),
        logits,
        targets,
        log_probs,
        *(statistics or (log_probs,) * 3),
        log_probs if upstream is None else upstream,
        logits.stride(0),
        vocabulary,
        factor,
        softcap,
        inverse_temperature,
        HAS_SOFTCAP=softcap > 0,
        STATISTICS=statistics is not None,
        GRADIENT=gradient,
        HAS_UPSTREAM=upstream is not None,
        BLOCK=min(_max_block(softcap > 0), next_power_of_2(vocabulary)),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


@triton.jit
def _scale_rows(x_ptr, out_ptr, factors_ptr, hidden, BLOCK: tl.constexpr):
    """out = factor x in fp32, a factor a row, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
    y = x * tl.load(factors_ptr + row)
    tl.store(out_ptr + row * hidden + at, y.to(out_ptr.dtype.element_ty), mask=at < hidden)


def scale_rows(x: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Writes x (rows, hidden) times a factor (rows,) of fp32 each into `out`; all contiguous."""
    rows, hidden = x.shape
    block = min(SCALE_BLOCK, next_power_of_2(hidden))
    launch(
        _scale_rows,
        (rows, cdiv(hidden, block)),
        x,
        out,
        factors,
        hidden,
        BLOCK=block,
        num_warps=SCALE_WARPS,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    """With statistics, soft-capping and upstream gradients; the rows' factors of the backward."""
    types = {
        "targets_ptr": "*i64",
        "log_probs_ptr": "*fp32",
        "entropies_ptr": "*fp32",
        "means_ptr": "*fp32",
        "tops_ptr": "*i1",
        "upstream_ptr": "*fp32",
        "factor": "fp32",
        "softcap": "fp32",
        "inverse_temperature": "fp32",
    }
    more = {"factors_ptr": "*fp32"}
    scaling = {"BLOCK": SCALE_BLOCK}
    return [Shipped("scale_rows", _scale_rows, scaling, SCALE_WARPS, 1, types=more)] + [
        Shipped(
            f"log_probabilities {name}",
            _log_probabilities,
            {
                "HAS_SOFTCAP": capped,
                "STATISTICS": statistics,
                "GRADIENT": gradient,
                "HAS_UPSTREAM": upstream,
                "BLOCK": _max_block(capped),
            },
            NUM_WARPS,
            1,
            types=types,
            has_wide_stores=gradient,
        )
        for name, capped, statistics, gradient, upstream in (
            ("with statistics", False, True, True, False),
            ("soft-capped with statistics", True, True, True, False),
            ("of a reference", False, False, False, False),
            ("backward", False, False, True, True),
            ("soft-capped backward", True, False, True, True),
        )
    ]
