"""Triton kernel of 8-bit weights: FP8 (e4m3) or int8 values in rectangles that share a scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Shipped, cdiv, launch

#: Columns of a program's tile, within one column of blocks where those are as wide.
COLUMNS = 128
# : Its rows: on sm_90 FP8 took 11.8 machine instructions a value with 128 rows in four warps, 17.3
# with 32 (Triton 3.9); tiles that look up a scale for every value spill with more than 32.
ROWS, ROWS_OF_OTHERS = 128, 32
NUM_WARPS = 4
#: A value: memory takes as long on an H200 as 20 of them at four a cycle (3 bytes at 4.3 TB/s).
MOST_INSTRUCTIONS = 13.0
# : One rounding for the product: a fused multiply-add has nothing to add here.
EXACT = {"enable_fp_fusion": False}


@triton.jit
def _from_e4m3(byte):
    """The value of an e4m3 byte, given as int8, in fp32: sign, exponent and mantissa in fp32's
    places, times 2^120 for the other bias, which takes subnormal values along. By integers, since
    GPUs before 8.9 have no such type."""
    bits = (byte.to(tl.int32) << 20) & -2014314496  # 0x87F00000
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where(tl.abs(value) == 480.0, float("nan"), value)


@triton.jit
def _dequantize(
    values_ptr,
    scales_ptr,
    out_ptr,
    index_ptr,
    rows,
    table_rows,
    hidden,
    block_rows,
    block_columns,
    scale_columns,
    FP8: tl.constexpr,
    ALONG: tl.constexpr,
    INDEXED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """value = stored * scale of its block. ALONG: a tile lies in one column of blocks. INDEXED: row i
    of the result is the row of the table that index_ptr names; one outside is NaN."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < hidden)[None, :]
    at = row[:, None] * hidden + column[None, :]
    found, inside = row, row < rows
    if INDEXED:
        found = tl.load(index_ptr + row, mask=row < rows, other=0)
        inside = inside & (found >= 0) & (found < table_rows)
    known = inside[:, None] & (column < hidden)[None, :]
    place = found[:, None] * hidden + column[None, :]
    stored = tl.load(values_ptr + place, mask=known, other=0)
    blocks = scales_ptr + (found // block_rows) * scale_columns
    if ALONG:
        scale = tl.load(blocks + first // block_columns, mask=inside, other=float("nan"))[:, None]
    else:
        scale = tl.load(
            blocks[:, None] + (column // block_columns)[None, :], mask=known, other=float("nan")
        )
    value = _from_e4m3(stored) if FP8 else stored.to(tl.float32)
    tl.store(out_ptr + at, (value * scale).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    out: torch.Tensor,
    index: torch.Tensor | None = None,
) -> None:
    """Writes the values (out, in), or those of the rows that `index` names, all contiguous, into
    `out` in one launch."""
    columns = values.shape[1]
    rows = values.shape[0] if index is None else index.numel()
    along = block[1] % COLUMNS == 0 or block[1] >= columns
    tile_rows = ROWS if along else ROWS_OF_OTHERS
    launch(
        _dequantize,
        (cdiv(rows, tile_rows), cdiv(columns, COLUMNS)),
        values.view(torch.int8),
        scales,
        out,
        scales if index is None else index,
        rows,
        values.shape[0],
        columns,
        *block,
        scales.shape[1],
        FP8=values.dtype is not torch.int8,
        ALONG=along,
        INDEXED=index is not None,
        ROWS=tile_rows,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
        num_stages=1,
        **EXACT,
    )


def shipped() -> list[Shipped]:
    """FP8 by blocks of 128 x 128 and int8 by rows, whole or looked up, to bf16; blocks of another width."""
    return [
        Shipped(
            f"dequantize_8bit {name}",
            _dequantize,
            {"FP8": fp8, "ALONG": along, "INDEXED": indexed, "ROWS": rows, "COLUMNS": COLUMNS},
            NUM_WARPS,
            1,
            types={
                "values_ptr": "*i8",
                "scales_ptr": "*fp32",
                "index_ptr": "*i64",
            },
            values_per_program=rows * COLUMNS,
            max_instructions_per_value=MOST_INSTRUCTIONS if along else 0.0,
            options=EXACT,
        )
        for name, fp8, along, indexed, rows in (
            ("fp8", True, True, False, ROWS),
            ("int8", False, True, False, ROWS),
            ("int8 rows", False, True, True, ROWS),
            ("fp8 other blocks", True, False, False, ROWS_OF_OTHERS),
        )
    ]
