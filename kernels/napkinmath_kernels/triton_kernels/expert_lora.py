"""Triton kernels of adapters on experts: thin products of rows that are sorted by expert, each with
its expert's own low-rank factor.

Rows of one expert lie together and end at `offsets`; a program finds the expert of its rows by
itself, so the host never waits for the counts. A factor is read through its strides and in its own
type, as PEFT stores it: (experts, rank, in), or (out, rank, experts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Shipped, cdiv, launch, next_power_of_2

ROWS, COLUMNS, DEPTH = 64, 128, 64
NUM_WARPS = 4


@triton.jit
def _rows_of_tile(offsets_ptr, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, row behind the expert's last) of the tile-th run of ROWS rows; 0, 0, 0
    for a tile behind the last."""
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    end = tl.load(offsets_ptr + expert, mask=inside, other=0)
    start = tl.load(offsets_ptr + expert - 1, mask=inside & (expert > 0), other=0)
    tiles = tl.where(inside, (end - start + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    mine = (last - tiles <= tile) & (tile < last)
    first = start + (tile - (last - tiles)) * ROWS
    return (
        tl.sum(tl.where(mine, expert, 0), 0),
        tl.sum(tl.where(mine, first, 0), 0),
        tl.sum(tl.where(mine, end, 0), 0),
    )


@triton.jit
def _expert_down(
    x_ptr,
    factor_ptr,
    offsets_ptr,
    out_ptr,
    x_row_stride,
    width,
    rank,
    experts,
    factor_expert,
    factor_rank,
    factor_width,
    scaling,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out (rows, rank) = scaling * x (rows, width) F_e, F_e (width, rank)."""
    expert, first, end = _rows_of_tile(offsets_ptr, tl.program_id(0), experts, EXPERTS, ROWS)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, RANK)
    inside, ranks = row < end, column < rank
    factor = factor_ptr + expert.to(tl.int64) * factor_expert
    total = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for start in range(0, tl.where(end > first, width, 0), DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(
            x_ptr + row[:, None] * x_row_stride + k[None, :],
            mask=inside[:, None] & (k < width)[None, :],
            other=0.0,
        )
        f = tl.load(
            factor + k[:, None] * factor_width + column[None, :] * factor_rank,
            mask=(k < width)[:, None] & ranks[None, :],
            other=0.0,
        )
        total = tl.dot(x, f.to(x.dtype), total)
    at = out_ptr + row[:, None] * rank + column[None, :]
    tl.store(
        at, (total * scaling).to(out_ptr.dtype.element_ty), mask=inside[:, None] & ranks[None, :]
    )


@triton.jit
def _expert_up(
    thin_ptr,
    factor_ptr,
    offsets_ptr,
    out_ptr,
    out_row_stride,
    width,
    rank,
    experts,
    factor_expert,
    factor_rank,
    factor_width,
    scaling,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out (rows, width) += scaling * thin (rows, rank) F_e, F_e (rank, width)."""
    expert, first, end = _rows_of_tile(offsets_ptr, tl.program_id(0), experts, EXPERTS, ROWS)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, RANK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, ranks, columns = row < end, k < rank, column < width
    thin = tl.load(
        thin_ptr + row[:, None] * rank + k[None, :],
        mask=inside[:, None] & ranks[None, :],
        other=0.0,
    )
    factor = factor_ptr + expert.to(tl.int64) * factor_expert
    f = tl.load(
        factor + k[:, None] * factor_rank + column[None, :] * factor_width,
        mask=ranks[:, None] & columns[None, :],
        other=0.0,
    )
    at = out_ptr + row[:, None] * out_row_stride + column[None, :]
    mask = inside[:, None] & columns[None, :]
    total = tl.dot(thin, f.to(thin.dtype)) * scaling + tl.load(at, mask=mask, other=0.0)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _expert_gradient(
    thin_ptr,
    wide_ptr,
    offsets_ptr,
    out_ptr,
    wide_row_stride,
    width,
    rank,
    out_expert,
    out_rank,
    out_width,
    scaling,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out_e (rank, width) = scaling * thin_e^T (rank, rows of e) wide_e (rows of e, width)."""
    expert = tl.program_id(0)
    end = tl.load(offsets_ptr + expert)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    k = tl.arange(0, RANK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ranks, columns = k < rank, column < width
    total = tl.zeros((RANK, COLUMNS), dtype=tl.float32)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < end
        thin = tl.load(
            thin_ptr + row[None, :] * rank + k[:, None],
            mask=inside[None, :] & ranks[:, None],
            other=0.0,
        )
        wide = tl.load(
            wide_ptr + row[:, None] * wide_row_stride + column[None, :],
            mask=inside[:, None] & columns[None, :],
            other=0.0,
        )
        total = tl.dot(thin, wide, total)
    at = out_ptr + expert.to(tl.int64) * out_expert
    at += k[:, None].to(tl.int64) * out_rank + column[None, :] * out_width
    tl.store(
        at, (total * scaling).to(out_ptr.dtype.element_ty), mask=ranks[:, None] & columns[None, :]
    )


def _rank_block(rank: int, least: int = 16) -> int:
    return max(least, next_power_of_2(rank))


#: sm_90 waits twice around a product of one instruction, and as often around one of two.
LEAST_UP = 32


def _tiles(rows: int, experts: int) -> int:
    """No fewer than the experts' rows take, whatever the counts are."""
    return cdiv(rows, ROWS) + experts


def expert_down(
    x: torch.Tensor, factor: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, scaling: float
) -> None:
    """out (rows, rank), contiguous, = scaling * x (rows, width) F_e; `factor` (experts, width, rank)
    of any strides and type."""
    experts, width, rank = factor.shape
    launch(
        _expert_down,
        (_tiles(x.shape[0], experts),),
        x,
        factor,
        offsets,
        out,
        x.stride(0),
        width,
        rank,
        experts,
        factor.stride(0),
        factor.stride(2),
        factor.stride(1),
        scaling,
        RANK=_rank_block(rank),
        EXPERTS=next_power_of_2(experts),
        ROWS=ROWS,
        DEPTH=DEPTH,
        num_warps=NUM_WARPS,
        num_stages=3,
    )


def expert_up(
    thin: torch.Tensor,
    factor: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
) -> None:
    """out (rows, width) += scaling * thin (rows, rank) F_e; `factor` (experts, rank, width) of any
    strides and type."""
    experts, rank, width = factor.shape
    launch(
        _expert_up,
        (_tiles(thin.shape[0], experts), cdiv(width, COLUMNS)),
        thin,
        factor,
        offsets,
        out,
        out.stride(0),
        width,
        rank,
        experts,
        factor.stride(0),
        factor.stride(1),
        factor.stride(2),
        scaling,
        RANK=_rank_block(rank, LEAST_UP),
        EXPERTS=next_power_of_2(experts),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def expert_gradient(
    thin: torch.Tensor,
    wide: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
) -> None:
    """out (experts, rank, width), of any strides and type, = scaling * thin_e^T wide_e."""
    experts, rank, width = out.shape
    launch(
        _expert_gradient,
        (experts, cdiv(width, COLUMNS)),
        thin,
        wide,
        offsets,
        out,
        wide.stride(0),
        width,
        rank,
        *out.stride(),
        scaling,
        RANK=_rank_block(rank),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
        num_stages=3,
    )


def shipped() -> list[Shipped]:
    """A rank up to 16 and one of 64, with 128 experts; factors and their gradients in fp32."""
    common = {"factor_ptr": "*fp32", "offsets_ptr": "*i32", "scaling": "fp32"}
    found: list[Shipped] = []
    for rank in (16, 64):
        sizes = {"RANK": rank, "ROWS": ROWS}
        aligned = ("width", "rank", "factor_rank")
        found += [
            Shipped(
                f"expert lora down {rank}",
                _expert_down,
                {**sizes, "EXPERTS": 128, "DEPTH": DEPTH, "factor_width": 1},
                NUM_WARPS,
                3,
                types=common,
                aligned=aligned,
                has_dot=True,
            ),
            Shipped(
                f"expert lora up {rank}",
                _expert_up,
                {
                    **sizes,
                    "RANK": _rank_block(rank, LEAST_UP),
                    "EXPERTS": 128,
                    "COLUMNS": COLUMNS,
                    "factor_width": 1,
                },
                NUM_WARPS,
                1,
                types=common,
                aligned=aligned,
                has_dot=True,
            ),
            Shipped(
                f"expert lora gradient {rank}",
                _expert_gradient,
                {**sizes, "COLUMNS": COLUMNS, "out_width": 1},
                NUM_WARPS,
                3,
                types={"out_ptr": "*fp32", "offsets_ptr": "*i32", "scaling": "fp32"},
                aligned=("width", "rank", "out_rank"),
                has_dot=True,
                has_wide_stores=False,  # a factor's gradient is small, and written once
            ),
        ]
    return found
