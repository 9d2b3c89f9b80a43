"""Triton kernels of RMS norm: one row a program forward, a strip of rows a program backward; narrow
rows, as of heads, by the tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rows import as_rows
from .launch import Shipped, cdiv, launch, next_power_of_2, num_processors

#: Widest block whose row, weight and weight gradient stay in one program's registers.
WIDEST_TOGETHER = 8192
STRIP_ROWS, STRIP_COLUMNS = 4, 512
# : Rows up to this wide are taken by the tile: the norms of queries and keys have one of 128 values
# for every head of every token.
WIDEST_NARROW = 512
TILE_VALUES = 4096
TILE_WARPS = 8


@triton.jit
def _rms_norm_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    hidden,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x' / sqrt(mean(x'^2) + eps) * (weight + offset), with x' = x + residual, written to
    sum_ptr when there is one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * hidden + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)  # the backward sees the stored sum, so the forward uses it too
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(
        y_ptr + row * hidden + columns, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _rms_norm_forward_narrow(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    rows,
    hidden,
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same, without a residual, for a tile of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (columns < hidden)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0).to(tl.float32) + offset
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / hidden + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(
        y_ptr + row[:, None] * hidden + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _rms_norm_backward_narrow(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    dy_stride,
    x_stride,
    rows,
    hidden,
    offset,
    WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The backward, without a gradient of the sum, a tile of rows at a time."""
    columns = tl.arange(0, BLOCK)
    weight = (
        tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0).to(tl.float32)[None, :]
        + offset
    )
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (columns < hidden)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = x * rstd
        g = dy * weight
        dx = (g - normed * (tl.sum(g * normed, 1) / hidden)[:, None]) * rstd
        tl.store(
            dx_ptr + row[:, None] * hidden + columns[None, :],
            dx.to(dx_ptr.dtype.element_ty),
            mask=mask,
        )
        if WEIGHT_GRADIENT:
            dw += dy * normed
    if WEIGHT_GRADIENT:
        tl.store(dw_ptr + tl.program_id(0) * hidden + columns, tl.sum(dw, 0), mask=columns < hidden)


@triton.jit
def _rms_norm_backward(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    rows,
    hidden,
    offset,
    HAS_DSUM: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = rstd (g - xhat mean(g xhat)) with g = dy (weight + offset); a program sums dy xhat over
    its rows into one row of dw."""
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        dy = tl.load(dy_ptr + row64 * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row64 * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row64)
        normed = x * rstd
        g = dy * weight
        dx = (g - normed * (tl.sum(g * normed, 0) / hidden)) * rstd
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row64 * dsum_stride + columns, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + row64 * hidden + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT_GRADIENT:
            dw += dy * normed
    if WEIGHT_GRADIENT:
        tl.store(dw_ptr + tl.program_id(0) * hidden + columns, dw, mask=mask)


@triton.jit
def _rms_norm_weight_gradient(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    dw_ptr,
    dy_stride,
    x_stride,
    rows,
    hidden,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums of dy xhat over a strip of rows, for a block of columns: what rows too wide for
    one program's registers use."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (columns < hidden)[None, :]
        row64 = row.to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + row64 * dy_stride + columns[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        x = tl.load(x_ptr + row64 * x_stride + columns[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        dw += tl.sum(dy * x * rstd[:, None], 0)
    tl.store(dw_ptr + tl.program_id(0) * hidden + columns, dw, mask=columns < hidden)


def row_warps(block: int) -> int:
    """Warps for a row of `block` values: at least 8 values a thread (one 16-byte access of bf16),
    at most 16 warps."""
    return max(1, min(16, block // 512))


def _narrow(block: int) -> dict[str, int]:
    """Options of a launch over tiles of narrow rows."""
    return {
        "ROWS": max(1, TILE_VALUES // block),
        "BLOCK": block,
        "num_warps": TILE_WARPS,
        "num_stages": 1,
    }


def rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, x + residual or None, rstd) of x (..., hidden)."""
    rows, added = as_rows(x), as_rows(x if residual is None else residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    num_rows, hidden = rows.shape
    block = next_power_of_2(hidden)
    if residual is None and block <= WIDEST_NARROW:
        options = _narrow(block)
        sizes = (rows.stride(0), num_rows, hidden, eps, offset)
        launch(
            _rms_norm_forward_narrow,
            (cdiv(num_rows, options["ROWS"]),),
            rows,
            weight.contiguous(),
            y,
            rstd,
            *sizes,
            **options,
        )
        return y, None, rstd
    launch(
        _rms_norm_forward,
        (num_rows,),
        rows,
        added,
        weight.contiguous(),
        y,
        y if total is None else total,
        rstd,
        rows.stride(0),
        added.stride(0),
        hidden,
        eps,
        offset,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=row_warps(block),
        num_stages=1,
    )
    return y, total, rstd


def backward_programs(x: torch.Tensor, rows: int) -> int:
    """Programs of a backward over `rows`: two a multiprocessor, each of which leaves one fp32 row
    of partial sums."""
    return min(rows, 2 * num_processors(x))


#: A multiprocessor's, of compute capability 8.0, 9.0 and 10.0 (CUDA programming guide).
WARPS_OF_A_PROCESSOR = 64


def row_programs(x: torch.Tensor, rows: int, warps: int, *, leave_sums: bool) -> int:
    """Programs of the gradient of x over `rows`: where they leave no sums, as many as have room, so
    that more rows are on their way from memory."""
    if leave_sums:
        return backward_programs(x, rows)
    return min(rows, num_processors(x) * max(2, WARPS_OF_A_PROCESSOR // warps))


def rms_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, dweight or None); the partial sums of dweight are added in a fixed order, so the result
    repeats bit for bit."""
    rows, upstream, upstream_sum = as_rows(x), as_rows(dy), as_rows(dy if dsum is None else dsum)
    num_rows, hidden = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs = backward_programs(x, num_rows)
    partial = (
        torch.empty((programs, hidden), dtype=torch.float32, device=x.device)
        if weight_gradient
        else None
    )
    block = next_power_of_2(hidden)
    if dsum is None and block <= WIDEST_NARROW:
        launch(
            _rms_norm_backward_narrow,
            (row_programs(x, num_rows, TILE_WARPS, leave_sums=weight_gradient),),
            upstream,
            rows,
            weight.contiguous(),
            rstd.contiguous(),
            dx,
            rstd if partial is None else partial,
            *(upstream.stride(0), rows.stride(0), num_rows, hidden, offset),
            WEIGHT_GRADIENT=weight_gradient,
            **_narrow(block),
        )
        return dx, None if partial is None else partial.sum(0).to(weight.dtype)
    together = weight_gradient and block <= WIDEST_TOGETHER
    launch(
        _rms_norm_backward,
        (row_programs(x, num_rows, row_warps(block), leave_sums=together),),
        upstream,
        upstream_sum,
        rows,
        weight.contiguous(),
        rstd.contiguous(),
        dx,
        rstd if partial is None else partial,
        upstream.stride(0),
        upstream_sum.stride(0),
        rows.stride(0),
        num_rows,
        hidden,
        offset,
        HAS_DSUM=dsum is not None,
        WEIGHT_GRADIENT=together,
        BLOCK=block,
        num_warps=row_warps(block),
        num_stages=1,
    )
    if partial is not None and not together:
        launch(
            _rms_norm_weight_gradient,
            (programs, cdiv(hidden, STRIP_COLUMNS)),
            upstream,
            rows,
            rstd.contiguous(),
            partial,
            upstream.stride(0),
            rows.stride(0),
            num_rows,
            hidden,
            BLOCK_ROWS=STRIP_ROWS,
            BLOCK=STRIP_COLUMNS,
            num_warps=4,
            num_stages=1,
        )
    return dx, None if partial is None else partial.sum(0).to(weight.dtype)


def shipped() -> list[Shipped]:
    """Hidden sizes of real models, with everything switched on."""
    floats = {"rstd_ptr": "*fp32", "dw_ptr": "*fp32", "eps": "fp32", "offset": "fp32"}
    found = [
        Shipped(
            "rms_norm_weight_gradient",
            _rms_norm_weight_gradient,
            {"BLOCK_ROWS": STRIP_ROWS, "BLOCK": STRIP_COLUMNS},
            4,
            1,
            types={"rstd_ptr": "*fp32", "dw_ptr": "*fp32"},
        )
    ]
    for size in (64, 128, 256, 512):
        switches = {"ROWS": TILE_VALUES // size, "BLOCK": size}
        for kernel, more in (
            (_rms_norm_forward_narrow, {}),
            (_rms_norm_backward_narrow, {"WEIGHT_GRADIENT": True}),
        ):
            types = {name: kind for name, kind in floats.items() if name in kernel.arg_names}
            name = f"{kernel.__name__.removeprefix('_')} h={size}"
            found.append(Shipped(name, kernel, {**more, **switches}, TILE_WARPS, 1, types=types))
    for hidden in (1024, 4096, 8192, 16384):
        warps = row_warps(hidden)
        forward, backward = (
            {"HAS_RESIDUAL": True},
            {"HAS_DSUM": True, "WEIGHT_GRADIENT": hidden <= WIDEST_TOGETHER},
        )
        for kernel, switches in ((_rms_norm_forward, forward), (_rms_norm_backward, backward)):
            types = {name: kind for name, kind in floats.items() if name in kernel.arg_names}
            name = kernel.__name__.removeprefix("_")
            found.append(
                Shipped(
                    f"{name} h={hidden}",
                    kernel,
                    {**switches, "BLOCK": hidden},
                    warps,
                    1,
                    types=types,
                )
            )
    return found
