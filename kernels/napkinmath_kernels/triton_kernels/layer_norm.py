"""Triton kernels of layer norm: one row a program forward, a strip of rows a program backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rows import as_rows
from .launch import Shipped, cdiv, launch, next_power_of_2
from .rms_norm import backward_programs, row_programs, row_warps

#: Widest block whose row, weight and two gradients stay in one program's registers.
WIDEST_TOGETHER = 4096
STRIP_ROWS, STRIP_COLUMNS = 4, 512


@triton.jit
def _layer_norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    hidden,
    eps,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = (x - mean) / sqrt(var + eps) * weight + bias; the variance is of the centred values, so
    it does not cancel."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / hidden
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / hidden + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = centred * rstd * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * hidden + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    dy_stride,
    x_stride,
    rows,
    hidden,
    PARAMETER_GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy weight; a program sums dy xhat and dy
    over its rows."""
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        dy = tl.load(dy_ptr + row64 * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row64 * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row64)
        normed = tl.where(mask, (x - tl.load(mean_ptr + row64)) * rstd, 0.0)
        g = dy * weight
        dx = (g - tl.sum(g, 0) / hidden - normed * (tl.sum(g * normed, 0) / hidden)) * rstd
        tl.store(dx_ptr + row64 * hidden + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if PARAMETER_GRADIENTS:
            dw += dy * normed
            db += dy
    if PARAMETER_GRADIENTS:
        tl.store(dw_ptr + tl.program_id(0) * hidden + columns, dw, mask=mask)
        tl.store(db_ptr + tl.program_id(0) * hidden + columns, db, mask=mask)


@triton.jit
def _layer_norm_parameter_gradients(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dw_ptr,
    db_ptr,
    dy_stride,
    x_stride,
    rows,
    hidden,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same sums over a strip of rows for a block of columns: what rows too wide for one
    program's registers use."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
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
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        dw += tl.sum(dy * (x - mean[:, None]) * rstd[:, None], 0)
        db += tl.sum(dy, 0)
    tl.store(dw_ptr + tl.program_id(0) * hidden + columns, dw, mask=columns < hidden)
    tl.store(db_ptr + tl.program_id(0) * hidden + columns, db, mask=columns < hidden)


def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) of x (..., hidden)."""
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    num_rows, hidden = rows.shape
    block = next_power_of_2(hidden)
    weight = weight.contiguous()
    launch(
        _layer_norm_forward,
        (num_rows,),
        rows,
        weight,
        weight if bias is None else bias.contiguous(),
        y,
        mean,
        rstd,
        rows.stride(0),
        hidden,
        eps,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=row_warps(block),
        num_stages=1,
    )
    return y, mean, rstd


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    parameter_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias), the latter two None unless asked for; sums are taken in a fixed
    order."""
    rows, upstream = as_rows(x), as_rows(dy)
    num_rows, hidden = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs = backward_programs(x, num_rows)
    block = next_power_of_2(hidden)
    partial = (
        torch.empty((2, programs, hidden), dtype=torch.float32, device=x.device)
        if parameter_gradients
        else None
    )
    dw, db = (rstd, rstd) if partial is None else partial
    together = parameter_gradients and block <= WIDEST_TOGETHER
    strides = (upstream.stride(0), rows.stride(0))
    mean, rstd = mean.contiguous(), rstd.contiguous()
    launch(
        _layer_norm_backward,
        (row_programs(x, num_rows, row_warps(block), leave_sums=together),),
        upstream,
        rows,
        weight.contiguous(),
        mean,
        rstd,
        dx,
        dw,
        db,
        *strides,
        num_rows,
        hidden,
        PARAMETER_GRADIENTS=together,
        BLOCK=block,
        num_warps=row_warps(block),
        num_stages=1,
    )
    if partial is None:
        return dx, None, None
    if not together:
        launch(
            _layer_norm_parameter_gradients,
            (programs, cdiv(hidden, STRIP_COLUMNS)),
            upstream,
            rows,
            mean,
            rstd,
            dw,
            db,
            *strides,
            num_rows,
            hidden,
            BLOCK_ROWS=STRIP_ROWS,
            BLOCK=STRIP_COLUMNS,
            num_warps=4,
            num_stages=1,
        )
    dweight, dbias = partial.sum(1).to(weight.dtype)
    return dx, dweight.clone(), dbias.clone()


def shipped() -> list[Shipped]:
    """Hidden sizes of real models, with everything switched on."""
    floats = {
        "mean_ptr": "*fp32",
        "rstd_ptr": "*fp32",
        "dw_ptr": "*fp32",
        "db_ptr": "*fp32",
        "eps": "fp32",
    }

    def types(kernel: object) -> dict[str, str]:
        return {name: kind for name, kind in floats.items() if name in kernel.arg_names}  # type: ignore[attr-defined]

    strip = {"BLOCK_ROWS": STRIP_ROWS, "BLOCK": STRIP_COLUMNS}
    kernel = _layer_norm_parameter_gradients
    found = [Shipped("layer_norm_parameter_gradients", kernel, strip, 4, 1, types=types(kernel))]
    for hidden in (1024, 4096, 16384):
        warps = row_warps(hidden)
        name = f"layer_norm_forward h={hidden}"
        found.append(
            Shipped(
                name,
                _layer_norm_forward,
                {"HAS_BIAS": True, "BLOCK": hidden},
                warps,
                1,
                types=types(_layer_norm_forward),
            )
        )
        switches = {"PARAMETER_GRADIENTS": hidden <= WIDEST_TOGETHER, "BLOCK": hidden}
        name = f"layer_norm_backward h={hidden}"
        found.append(
            Shipped(
                name, _layer_norm_backward, switches, warps, 1, types=types(_layer_norm_backward)
            )
        )
    return found
