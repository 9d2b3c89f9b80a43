"""Triton kernel of the divergence of a student from a teacher over a chunk of both models' logits;
the student's become their gradient in place.

Rows of logits are padded to a multiple of 64 columns, as in the cross-entropy's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .cross_entropy import NUM_WARPS
from .launch import Shipped, launch, next_power_of_2
from .log_probabilities import _bent

#: Two rows are in flight.
MAX_BLOCK = 4096
FORWARD, REVERSE, BETWEEN = 0, 1, 2


@triton.jit
def _scores(
    start, columns, stride, vocabulary, scale, softcap, inverse_temperature, HAS: tl.constexpr
):
    """Of some columns in fp32; -inf behind the vocabulary."""
    x = tl.load(start + columns, mask=columns < stride, other=0.0).to(tl.float32)
    z = _bent(x, scale, softcap, HAS) * inverse_temperature
    return tl.where(columns < vocabulary, z, float("-inf"))


@triton.jit
def _normalizer(
    start,
    stride,
    vocabulary,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(largest score, log of the sum of exp(score - largest)) of a row."""
    largest = float("-inf")
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = _scores(
            start, columns, stride, vocabulary, scale, softcap, inverse_temperature, HAS_SOFTCAP
        )
        bigger = tl.maximum(largest, tl.max(z, 0))
        # nothing finite yet: -inf - -inf would be NaN
        reference = tl.where(bigger == float("-inf"), 0.0, bigger)
        total = total * tl.exp(largest - reference) + tl.sum(tl.exp(z - reference), 0)
        largest = bigger
    return largest, tl.log(total)


@triton.jit
def _of(share, gap):
    """share times gap, where a word without a share adds 0."""
    return tl.where(share > 0.0, share * gap, 0.0)


@triton.jit
def _from_mixture(lead, beta):
    """(log share - log mixture of the student, of the teacher), whose log share leads by so much:
    errors are of their difference, not of either logarithm."""
    small = tl.exp(-tl.abs(lead))
    behind = lead <= 0.0
    mixed = tl.log(tl.where(behind, 1.0 - beta + beta * small, (1.0 - beta) * small + beta))
    return -mixed - tl.where(behind, 0.0, lead), -mixed + tl.where(behind, lead, 0.0)


@triton.jit
def _write_gradient(
    start,
    taught_start,
    logits_stride,
    taught_stride,
    vocabulary,
    beta,
    own_scale,
    own_cap,
    taught_scale,
    taught_cap,
    inverse_temperature,
    slope,
    largest,
    log_sum,
    taught_largest,
    taught_log_sum,
    from_own,
    OWN_CAPPED: tl.constexpr,
    TAUGHT_CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The student's logits of a row become slope times d divergence / d logit."""
    shift = taught_log_sum - log_sum
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        known = columns < vocabulary
        x = tl.load(start + columns, mask=columns < logits_stride, other=0.0).to(tl.float32)
        capped = _bent(x, own_scale, own_cap, OWN_CAPPED)
        y = _scores(
            taught_start,
            columns,
            taught_stride,
            vocabulary,
            taught_scale,
            taught_cap,
            inverse_temperature,
            TAUGHT_CAPPED,
        )
        z = capped * inverse_temperature - largest
        y -= taught_largest
        share = tl.exp(z - log_sum)
        lead = (y - z) - shift
        if KIND == 0:
            gradient = share - tl.exp(y - taught_log_sum)
        if KIND == 1:
            gradient = -_of(share, lead + from_own)
        if KIND == 2:
            gap, _ = _from_mixture(lead, beta)
            gradient = _of(share, gap - from_own)
        if OWN_CAPPED:
            gradient *= 1.0 - (capped / own_cap) * (capped / own_cap)
        # zero in the padding: a GEMM may read it, and times zero a NaN stays one
        gradient = tl.where(known, gradient * slope, 0.0)
        tl.store(
            start + columns,
            gradient.to(start.dtype.element_ty),
            mask=columns < logits_stride,
        )


@triton.jit
def _sums(
    start,
    taught_start,
    logits_stride,
    taught_stride,
    vocabulary,
    beta,
    own_scale,
    own_cap,
    taught_scale,
    taught_cap,
    inverse_temperature,
    largest,
    log_sum,
    taught_largest,
    taught_log_sum,
    OWN_CAPPED: tl.constexpr,
    TAUGHT_CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(divergence of the student, of the teacher, from what it is compared with; the student's
    entropy) of a row."""
    shift = taught_log_sum - log_sum
    from_own = 0.0
    from_taught = 0.0
    entropy = 0.0
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = _scores(
            start,
            columns,
            logits_stride,
            vocabulary,
            own_scale,
            own_cap,
            inverse_temperature,
            OWN_CAPPED,
        )
        y = _scores(
            taught_start,
            columns,
            taught_stride,
            vocabulary,
            taught_scale,
            taught_cap,
            inverse_temperature,
            TAUGHT_CAPPED,
        )
        # less the maximum first: a sum with it would round what is left
        z -= largest
        y -= taught_largest
        own = z - log_sum
        share = tl.exp(own)
        lead = (y - z) - shift
        if ENTROPY:
            entropy -= tl.sum(_of(share, own), 0)
        if KIND == 1:
            from_own -= tl.sum(_of(share, lead), 0)
        else:
            teacher = tl.exp(y - taught_log_sum)
            if KIND == 0:
                from_taught += tl.sum(_of(teacher, lead), 0)
            else:
                gap, taught_gap = _from_mixture(lead, beta)
                from_own += tl.sum(_of(share, gap), 0)
                from_taught += tl.sum(_of(teacher, taught_gap), 0)
    return from_own, from_taught, entropy


@triton.jit
def _divergence(
    logits_ptr,
    taught_ptr,
    losses_ptr,
    entropies_ptr,
    scale_ptr,
    logits_stride,
    taught_stride,
    vocabulary,
    beta,
    own_scale,
    own_cap,
    taught_scale,
    taught_cap,
    inverse_temperature,
    OWN_CAPPED: tl.constexpr,
    TAUGHT_CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence of each row, and its student's entropy; the student's logits become scale times
    d divergence / d logit."""
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * logits_stride
    taught_start = taught_ptr + row.to(tl.int64) * taught_stride
    largest, log_sum = _normalizer(
        start, logits_stride, vocabulary, own_scale, own_cap, inverse_temperature, OWN_CAPPED, BLOCK
    )
    taught_largest, taught_log_sum = _normalizer(
        taught_start,
        taught_stride,
        vocabulary,
        taught_scale,
        taught_cap,
        inverse_temperature,
        TAUGHT_CAPPED,
        BLOCK,
    )
    # fmt: off
    from_own, from_taught, entropy = _sums(
        start, taught_start, logits_stride, taught_stride, vocabulary, beta, own_scale,
        own_cap, taught_scale, taught_cap, inverse_temperature, largest, log_sum,
        taught_largest, taught_log_sum, OWN_CAPPED, TAUGHT_CAPPED, KIND, ENTROPY, BLOCK,
    )
    # fmt: on
    divergence = from_own + from_taught
    if KIND == 2:
        divergence = (1.0 - beta) * from_own + beta * from_taught
    tl.store(losses_ptr + row, divergence)
    if ENTROPY:
        tl.store(entropies_ptr + row, entropy)
    if GRADIENT:
        slope = own_scale * inverse_temperature * tl.load(scale_ptr)
        if KIND == 2:
            slope *= 1.0 - beta
        # fmt: off
        _write_gradient(
            start, taught_start, logits_stride, taught_stride, vocabulary, beta, own_scale,
            own_cap, taught_scale, taught_cap, inverse_temperature, slope, largest, log_sum,
            taught_largest, taught_log_sum, from_own, OWN_CAPPED, TAUGHT_CAPPED, KIND, BLOCK,
        )
        # fmt: on


def divergence_of_chunk(
    logits: torch.Tensor,
    taught: torch.Tensor,
    losses: torch.Tensor,
    entropies: torch.Tensor | None,
    scale: torch.Tensor,
    beta: float,
    shaping: Any,
    gradient: bool,
) -> None:
    """Writes the rows' divergences and, if asked, the student's entropies; with `gradient` its
    logits (rows, vocabulary) become scale times theirs. `shaping`: ops/divergence.py."""
    rows, vocabulary = logits.shape
    kind = FORWARD if beta == 0 else REVERSE if beta == 1 else BETWEEN
    launch(
        _divergence,
        (rows,),
        logits,
        taught,
        losses,
        losses if entropies is None else entropies,
        scale,
        logits.stride(0),
        taught.stride(0),
        vocabulary,
        beta,
        shaping.scales[0],
        shaping.softcaps[0],
        shaping.scales[1],
        shaping.softcaps[1],
        shaping.inverse_temperature,
        OWN_CAPPED=shaping.softcaps[0] > 0,
        TAUGHT_CAPPED=shaping.softcaps[1] > 0,
        KIND=kind,
        ENTROPY=entropies is not None,
        GRADIENT=gradient,
        BLOCK=min(MAX_BLOCK, next_power_of_2(vocabulary)),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    """Each divergence, the general one also soft-capped and with entropies."""
    numbers = ("beta", "own_scale", "own_cap")
    numbers += ("taught_scale", "taught_cap", "inverse_temperature")
    tensors = ("losses_ptr", "entropies_ptr", "scale_ptr")
    types = {**dict.fromkeys(numbers, "fp32"), **dict.fromkeys(tensors, "*fp32")}
    return [
        Shipped(
            f"divergence {name}",
            _divergence,
            {
                "OWN_CAPPED": capped,
                "TAUGHT_CAPPED": capped,
                "KIND": kind,
                "ENTROPY": entropy,
                "GRADIENT": True,
                "BLOCK": MAX_BLOCK,
            },
            NUM_WARPS,
            1,
            types=types,
        )
        for name, kind, capped, entropy in (
            ("forward KL", FORWARD, False, False),
            ("reverse KL", REVERSE, False, True),
            ("generalized JSD", BETWEEN, False, False),
            ("generalized JSD, soft-capped with entropy", BETWEEN, True, True),
        )
    ]
