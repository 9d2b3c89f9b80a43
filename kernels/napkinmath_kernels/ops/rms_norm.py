"""RMS norm, with or without the residual addition in front of it.

    y = x' / sqrt(mean(x'^2, -1) + eps) * (weight + offset)        x' = x, or x + residual (rounded to x's dtype and returned)

Everything is computed in fp32 and rounded once. `offset` is 1 for Gemma, whose stored weight is the
distance from one. Saved for the backward: x' (rows x hidden, x's dtype; the input itself when there
is no residual), weight, and rstd (rows, fp32). Temporaries: backward with a trained weight, fp32
partial sums (min(rows, 2 x multiprocessors) x hidden). See `costs.rms_norm`. Source: Zhang &
Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..backend import runs_triton
from .eager import run, short_way

FALLBACK = "torch.nn.functional.rms_norm"
#: Hidden sizes up to here fit one program's registers.
MAX_HIDDEN = 16384


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def reference_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, x + residual or None, rstd) of x (..., hidden), in plain torch."""
    total = None if residual is None else (_compute(x) + _compute(residual)).to(x.dtype)
    wide = _compute(x if total is None else total)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd[..., None] * (_compute(weight) + offset)
    return y.to(x.dtype), total, rstd


def reference_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, dweight or None) of `reference_forward`, where x is what was saved (the sum when there
    was a residual)."""
    wide_dy = _compute(dy)
    normed = _compute(x) * rstd[..., None]
    g = wide_dy * (_compute(weight) + offset)
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd[..., None]
    if dsum is not None:
        dx = dx + _compute(dsum)
    return dx.to(x.dtype), (
        (wide_dy * normed).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
        if weight_gradient
        else None
    )


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[Any, Any, Any]:
    if runs_triton("rms_norm", x):
        from ..triton_kernels.rms_norm import rms_norm_forward

        return rms_norm_forward(x, residual, weight, eps, offset)
    y, total, rstd = reference_forward(
        x, residual, weight, eps, offset
    )  # its results lie as its inputs do, the kernels' one after another
    return y.contiguous(), None if total is None else total.contiguous(), rstd.contiguous()


def _backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if runs_triton("rms_norm", x):
        from ..triton_kernels.rms_norm import rms_norm_backward as backward
    else:
        backward = reference_backward
    dx, dweight = backward(dy, dsum, x, weight, rstd, offset, weight_gradient)
    return dx.contiguous(), x.new_empty(0) if dweight is None else dweight


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


@torch.library.custom_op("napkinmath::rms_norm", mutates_args=())
def _rms_norm_op(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _forward(x, None, weight, eps, offset)
    return y, rstd


@_rms_norm_op.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_statistics_dtype(x))


@torch.library.custom_op("napkinmath::add_rms_norm", mutates_args=())
def _add_rms_norm_op(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total, rstd = _forward(x, residual, weight, eps, offset)
    return y, total, rstd


@_add_rms_norm_op.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty(x.shape[:-1], dtype=_statistics_dtype(x)),
    )


@torch.library.custom_op("napkinmath::rms_norm_backward", mutates_args=())
def _rms_norm_backward_op(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, dsum, x, weight, rstd, offset, weight_gradient)


@_rms_norm_backward_op.register_fake
def _(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), (
        weight.new_empty(weight.shape) if weight_gradient else x.new_empty(0)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, offset = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None, weight_index: int
) -> tuple[torch.Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    if dy is None:
        return dsum, None
    checks.refuse_second_derivative("rms_norm", FALLBACK)
    weight_gradient = ctx.needs_input_grad[weight_index]
    arguments = (dy, dsum, x, weight, rstd, ctx.offset, weight_gradient)
    dx, dweight = run(_rms_norm_backward_op, *arguments)
    return dx, dweight if weight_gradient else None


def _rms_norm_autograd(
    ctx: Any, dy: torch.Tensor | None, _drstd: None
) -> tuple[torch.Tensor | None, ...]:
    dx, dweight = _gradients(ctx, dy, None, 1)
    return dx, dweight, None, None


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, weight, _, offset = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.offset = offset
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _add_rms_norm_autograd(
    ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None, _drstd: None
) -> tuple[torch.Tensor | None, ...]:
    dx, dweight = _gradients(ctx, dy, dsum, 2)
    return dx, dx, dweight, None, None


_rms_norm = short_way(_rms_norm_op, _setup, _rms_norm_autograd)
_add_rms_norm = short_way(_add_rms_norm_op, _setup_add, _add_rms_norm_autograd)


@checks.remembered
def _check(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, offset: float
) -> None:
    added = {} if residual is None else {"residual": residual}
    checks.require_tensors("rms_norm", FALLBACK, x=x, weight=weight, **added)
    checks.require(
        checks.is_number(eps) and eps >= 0,
        "rms_norm",
        f"eps {eps!r}",
        "0 or a positive number",
        FALLBACK,
    )
    checks.require(
        checks.is_number(offset), "rms_norm", f"offset {offset!r}", "a finite number", FALLBACK
    )
    checks.require_dtype("rms_norm", "x", x, FALLBACK)
    shape_is_fine = x.dim() >= 1 and 0 < x.shape[-1] <= MAX_HIDDEN
    checks.require(
        shape_is_fine,
        "rms_norm",
        f"x of shape {tuple(x.shape)}",
        f"(..., hidden), hidden 1 to {MAX_HIDDEN}",
        FALLBACK,
    )
    checks.require_shape("rms_norm", "weight", weight, (x.shape[-1],), FALLBACK)
    checks.require_dtype("rms_norm", "weight", weight, FALLBACK)
    checks.require_same_device("rms_norm", FALLBACK, x=x, weight=weight, residual=residual)
    if residual is not None:
        checks.require_shape("rms_norm", "residual", residual, tuple(x.shape), FALLBACK)
        checks.require_dtype("rms_norm", "residual", residual, FALLBACK, (x.dtype,))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMS norm over the last dimension; with `residual`, the pair (norm(x + residual), x +
    residual).

    x, residual (..., hidden) bf16, fp16 or fp32; weight (hidden). Returns x's dtype. Raises
    KernelInputError.
    """
    _check(x, weight, residual, eps, offset)
    if residual is None:
        return _rms_norm(x, weight, eps, offset)[0]
    return _add_rms_norm(x, residual, weight, eps, offset)[:2]


class RMSNorm(torch.nn.Module):
    """RMS norm with a weight; equivalent to transformers' LlamaRMSNorm (`offset=0`) or Gemma's
    (`offset=1`)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - offset, dtype=dtype))
        self.eps = eps
        self.offset = offset

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm`."""
        return rms_norm(x, self.weight, self.eps, residual=residual, offset=self.offset)
