"""Triton kernels of 4-bit quantization: blocks of values that share a scale, two values a byte, the
first in the high half."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ..ops.nf4 import BLOCK_SIZES
from .launch import Shipped, cdiv, launch

# : Bytes of packed values a program takes. 4,096 (128 blocks of 64 values) gave 7.9 machine
# instructions a value on sm_90; 1,024 gave 12.3.
BYTES_PER_PROGRAM = 4096
NUM_WARPS = 4
# : One rounding for the product and one for the sum, as bitsandbytes has it in two launches: a
# fused multiply-add would round once.
EXACT = {"enable_fp_fusion": False}


@triton.jit
def _dequantize(
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    out_ptr,
    blocks,
    numel,
    RAGGED: tl.constexpr,
    NESTED: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """value = code[nibble] * absmax[block]; a nested absmax is nested_code[byte] *
    nested_absmax[block // NESTED_BLOCK] + offset.

    RAGGED: the last block is not whole, and its last byte may hold one value.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < blocks
    if NESTED:
        index = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        scale = tl.load(nested_absmax_ptr + block // NESTED_BLOCK, mask=mask, other=0.0)
        absmax = tl.load(nested_code_ptr + index) * scale + tl.load(offset_ptr)
    else:
        absmax = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    byte = tl.arange(0, BYTES)
    at = block[:, None] * BYTES + byte[None, :]
    inside = mask[:, None]
    if RAGGED:
        inside = at < (numel + 1) // 2
    packed = tl.load(packed_ptr + at, mask=inside, other=0).to(tl.int32)
    code = tl.load(code_ptr + tl.arange(0, 16))
    flat = tl.reshape(
        packed, (BLOCKS * BYTES,)
    )  # a flat gather reads 16 table entries; one along rows copies the table to every row
    high = tl.reshape(tl.gather(code, flat >> 4, 0), (BLOCKS, BYTES)) * absmax[:, None]
    low = tl.reshape(tl.gather(code, flat & 15, 0), (BLOCKS, BYTES)) * absmax[:, None]
    values = tl.reshape(tl.join(high, low), (BLOCKS, 2 * BYTES)).to(out_ptr.dtype.element_ty)
    value = tl.arange(0, 2 * BYTES)
    place = block[:, None] * (2 * BYTES) + value[None, :]
    whole = mask[:, None]
    if RAGGED:
        whole = place < numel
    tl.store(out_ptr + place, values, mask=whole)


@triton.jit
def _quantize(
    weight_ptr,
    bounds_ptr,
    order_ptr,
    packed_ptr,
    absmax_ptr,
    blocks,
    numel,
    RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """absmax[block] = max |w|; nibble = order[number of bounds below w / absmax]. A NaN counts as
    above every bound.

    RAGGED: the last block is not whole; what is missing of it counts as zeros.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < blocks
    value = tl.arange(0, 2 * BYTES)
    at = block[:, None] * (2 * BYTES) + value[None, :]
    inside = mask[:, None]
    if RAGGED:
        inside = at < numel
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(weight), 1)
    absmax = tl.where(tl.max((weight != weight).to(tl.int32), 1) > 0, float("nan"), absmax)
    tl.store(absmax_ptr + block, absmax, mask=mask)
    inverse = 1.0 / tl.where(absmax < 1e-38, 1e-38, absmax)
    scaled = weight * inverse[:, None]
    scaled = tl.where(scaled > 1.0, 1.0, tl.where(scaled < -1.0, -1.0, scaled))
    index = tl.zeros((BLOCKS, 2 * BYTES), dtype=tl.int32)
    for i in tl.static_range(15):
        index += tl.where(scaled <= tl.load(bounds_ptr + i), 0, 1)
    nibble = tl.gather(
        tl.load(order_ptr + tl.arange(0, 16)), tl.reshape(index, (BLOCKS * 2 * BYTES,)), 0
    )
    high, low = tl.split(tl.reshape(nibble, (BLOCKS, BYTES, 2)))
    byte = tl.arange(0, BYTES)
    place = block[:, None] * BYTES + byte[None, :]
    whole = mask[:, None]
    if RAGGED:
        whole = place < (numel + 1) // 2
    tl.store(packed_ptr + place, ((high << 4) | low).to(tl.uint8), mask=whole)


def _warps(blocksize: int) -> int:
    """Fewer warps where blocks are wide: a thread then covers whole rows and reads each scale once.

    On sm_90 blocks of 128 gave 7.4 instructions a value in two warps and 9.2 in four, blocks of 256
    6.1 in one and 9.1 in two.
    """
    if blocksize <= 64:
        return NUM_WARPS
    return 1 if 256 <= blocksize <= 512 else 2


def _blocks_per_program(blocksize: int) -> int:
    return max(1, 2 * BYTES_PER_PROGRAM // blocksize)


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    blocksize: int,
    nested_blocksize: int,
    out: torch.Tensor,
) -> None:
    """Writes the values into `out`, contiguous, in one launch. `nested` is (code, absmax,
    offset)."""
    grid, sizes, options = _decoding(out.numel(), blocksize, nested is not None, nested_blocksize)
    nested_code, nested_absmax, offset = nested if nested is not None else (code, code, code)
    launch(
        _dequantize,
        grid,
        packed,
        absmax,
        code,
        nested_code,
        nested_absmax,
        offset,
        out,
        *sizes,
        **options,
    )


@functools.cache
def _decoding(
    numel: int, blocksize: int, nested: bool, nested_blocksize: int
) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    """(grid, blocks and values, constexprs and options) of a weight's decoding."""
    blocks, per_program = cdiv(numel, blocksize), _blocks_per_program(blocksize)
    constexprs = {
        "RAGGED": numel % blocksize > 0,
        "NESTED": nested,
        "NESTED_BLOCK": nested_blocksize,
        "BLOCKS": per_program,
        "BYTES": blocksize // 2,
    }
    options = {"num_warps": _warps(blocksize), "num_stages": 1, **EXACT}
    return (cdiv(blocks, per_program),), (blocks, numel), {**constexprs, **options}


def quantize(
    weight: torch.Tensor,
    bounds: torch.Tensor,
    order: torch.Tensor,
    blocksize: int,
    packed: torch.Tensor,
    absmax: torch.Tensor,
) -> None:
    """Writes the packed nibbles and the blocks' fp32 scales of a contiguous `weight`."""
    blocks = cdiv(weight.numel(), blocksize)
    per_program = max(1, _blocks_per_program(blocksize) // 4)
    launch(
        _quantize,
        (cdiv(blocks, per_program),),
        weight,
        bounds,
        order,
        packed,
        absmax,
        blocks,
        weight.numel(),
        RAGGED=weight.numel() % blocksize > 0,
        BLOCKS=per_program,
        BYTES=blocksize // 2,
        num_warps=NUM_WARPS,
        num_stages=1,
        **EXACT,
    )


def shipped() -> list[Shipped]:
    """Every block size to bf16 from nested scales; 64 (bitsandbytes' default) from plain ones, with
    a ragged end and to fp32 too."""
    tables = {
        "packed_ptr": "*u8",
        "code_ptr": "*fp32",
        "nested_code_ptr": "*fp32",
        "nested_absmax_ptr": "*fp32",
        "offset_ptr": "*fp32",
    }
    found: list[Shipped] = []
    sizes = [
        (size, nested, "")
        for size in BLOCK_SIZES
        for nested in (True, False)
        if nested or size == 64
    ]
    for blocksize, nested, more in [*sizes, (64, True, "ragged"), (64, True, "fp32")]:
        blocks = _blocks_per_program(blocksize)
        wide = {"out_ptr": "*fp32"} if more == "fp32" else {}
        found.append(
            Shipped(
                " ".join(
                    filter(
                        None,
                        (f"dequantize_4bit block={blocksize}", "nested" if nested else "", more),
                    )
                ),
                _dequantize,
                {
                    "RAGGED": more == "ragged",
                    "NESTED": nested,
                    "NESTED_BLOCK": 256,
                    "BLOCKS": blocks,
                    "BYTES": blocksize // 2,
                },
                _warps(blocksize),
                1,
                types={
                    **tables,
                    **wide,
                    "absmax_ptr": "*u8" if nested else "*fp32",
                    "numel": "i64",
                },
                values_per_program=2 * BYTES_PER_PROGRAM,
                max_instructions_per_value=(
                    0.0 if more == "ragged" else 9.0
                ),  # no weight of a model has such an end
                has_wide_loads=more != "ragged",
                has_wide_stores=more != "ragged",
                forbidden="FFMA",
                options=EXACT,
            )
        )
    found.append(
        Shipped(
            "quantize_4bit block=64",
            _quantize,
            {"RAGGED": False, "BLOCKS": _blocks_per_program(64) // 4, "BYTES": 32},
            NUM_WARPS,
            1,
            types={
                "numel": "i64",
                "bounds_ptr": "*fp32",
                "order_ptr": "*i32",
                "packed_ptr": "*u8",
                "absmax_ptr": "*fp32",
            },
            options=EXACT,
            has_wide_stores=False,  # runs once, when a model is loaded
        )
    )
    return found
