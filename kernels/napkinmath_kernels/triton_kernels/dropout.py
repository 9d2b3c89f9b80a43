"""Triton kernels of dropout whose mask is never stored: Philox gives it again from the seed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Shipped, cdiv, launch

# : Values a program takes in each of its four strips; one Philox call makes one number for each
# strip.
STRIP = 1024
NUM_WARPS = 4


@triton.jit
def _dropout(
    x_ptr,
    out_ptr,
    seed_ptr,
    stream,
    threshold,
    scale,
    numel,
    ADD: tl.constexpr,
    STRIP: tl.constexpr,
):
    """out = keep ? x scale : 0, or out += that; keep is a 24-bit number >= threshold, from
    Philox(seed + stream, strip position)."""
    first = tl.program_id(0).to(tl.int64) * (4 * STRIP)
    lane = tl.arange(0, STRIP)
    position = tl.program_id(0) * STRIP + lane
    seed = tl.load(seed_ptr) + stream
    r0, r1, r2, r3 = tl.randint4x(seed, position)
    for i in tl.static_range(4):
        if i == 0:
            random = r0
        elif i == 1:
            random = r1
        elif i == 2:
            random = r2
        else:
            random = r3
        at = first + i * STRIP + lane
        mask = at < numel
        keep = (random.to(tl.uint32, bitcast=True) >> 8).to(tl.int32) >= threshold
        value = tl.where(
            keep, tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale, 0.0
        )
        if ADD:
            value += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


def dropout(
    x: torch.Tensor,
    out: torch.Tensor,
    seed: torch.Tensor,
    stream: int,
    threshold: int,
    scale: float,
    add: bool,
) -> None:
    """Writes or adds dropout(x) into `out`; both contiguous and of one size."""
    numel = x.numel()
    launch(
        _dropout,
        (cdiv(numel, 4 * STRIP),),
        x,
        out,
        seed,
        stream,
        threshold,
        scale,
        numel,
        ADD=add,
        STRIP=STRIP,
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    """Forward and backward."""
    types = {"seed_ptr": "*i64", "scale": "fp32", "numel": "i64"}
    return [
        Shipped(
            f"dropout {name}",
            _dropout,
            {"ADD": add, "STRIP": STRIP},
            NUM_WARPS,
            1,
            types=types,
            aligned=("numel",),
        )
        for name, add in (("forward", False), ("backward", True))
    ]
