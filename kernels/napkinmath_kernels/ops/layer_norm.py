"""Layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

Everything is computed in fp32 and rounded once. Saved for the backward: x, weight, mean and rstd
(rows, fp32 each). Temporaries: backward with trained parameters, fp32 partial sums (2 x min(rows, 2
x multiprocessors) x hidden). See `costs.layer_norm`. Source: Ba et al. 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..backend import runs_triton
from .eager import run, short_way

FALLBACK = "torch.nn.functional.layer_norm"
MAX_HIDDEN = 16384


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def reference_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) in plain torch."""
    wide = _compute(x)
    mean = wide.mean(-1)
    centred = wide - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[..., None] * _compute(weight)
    return (y if bias is None else y + _compute(bias)).to(x.dtype), mean, rstd


def reference_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    parameter_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias) of `reference_forward`; the latter two None unless asked for."""
    wide_dy = _compute(dy)
    normed = (_compute(x) - mean[..., None]) * rstd[..., None]
    g = wide_dy * _compute(weight)
    dx = (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * rstd[
        ..., None
    ]
    if not parameter_gradients:
        return dx.to(x.dtype), None, None
    hidden = weight.shape[0]
    sums = ((wide_dy * normed).reshape(-1, hidden).sum(0), wide_dy.reshape(-1, hidden).sum(0))
    return dx.to(x.dtype), sums[0].to(weight.dtype), sums[1].to(weight.dtype)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(
        x.shape[:-1], dtype=torch.float64 if x.dtype is torch.float64 else torch.float32
    )


@torch.library.custom_op("napkinmath::layer_norm", mutates_args=())
def _layer_norm_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if runs_triton("layer_norm", x):
        from ..triton_kernels.layer_norm import layer_norm_forward

        return layer_norm_forward(x, weight, bias, eps)
    y, mean, rstd = reference_forward(
        x, weight, bias, eps
    )  # its results lie as its inputs do, the kernels' one after another
    return y.contiguous(), mean.contiguous(), rstd.contiguous()


@_layer_norm_op.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), _statistics(x), _statistics(x)


@torch.library.custom_op("napkinmath::layer_norm_backward", mutates_args=())
def _layer_norm_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    parameter_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if runs_triton("layer_norm", x):
        from ..triton_kernels.layer_norm import layer_norm_backward as backward
    else:
        backward = reference_backward
    dx, dweight, dbias = backward(dy, x, weight, mean, rstd, parameter_gradients)
    return (
        dx.contiguous(),
        x.new_empty(0) if dweight is None else dweight,
        x.new_empty(0) if dbias is None else dbias,
    )


@_layer_norm_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    parameter_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    like = weight if parameter_gradients else x.new_empty(0)
    return x.new_empty(x.shape), like.new_empty(like.shape), like.new_empty(like.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    checks.refuse_second_derivative("layer_norm", FALLBACK)
    _, needs_weight, needs_bias, _ = ctx.needs_input_grad
    trains = needs_weight or needs_bias
    dx, dweight, dbias = run(_layer_norm_backward_op, dy, *ctx.saved_tensors, trains)
    return dx, dweight if needs_weight else None, dbias if needs_bias else None, None


_layer_norm = short_way(_layer_norm_op, _setup, _autograd)


@checks.remembered
def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
    added = {} if bias is None else {"bias": bias}
    checks.require_tensors("layer_norm", FALLBACK, x=x, weight=weight, **added)
    checks.require_dtype("layer_norm", "x", x, FALLBACK)
    checks.require_dtype("layer_norm", "weight", weight, FALLBACK)
    checks.require(
        checks.is_number(eps) and eps >= 0,
        "layer_norm",
        f"eps {eps!r}",
        "0 or a positive number",
        FALLBACK,
    )
    fits = x.dim() >= 1 and 0 < x.shape[-1] <= MAX_HIDDEN
    checks.require(
        fits,
        "layer_norm",
        f"x of shape {tuple(x.shape)}",
        f"(..., hidden), hidden 1 to {MAX_HIDDEN}",
        FALLBACK,
    )
    checks.require_same_device("layer_norm", FALLBACK, x=x, weight=weight, bias=bias)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            checks.require_shape("layer_norm", name, parameter, (x.shape[-1],), FALLBACK)
            checks.require_dtype("layer_norm", name, parameter, FALLBACK, (weight.dtype,))


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer norm over the last dimension: x (..., hidden) bf16, fp16 or fp32, weight and bias
    (hidden). Raises KernelInputError."""
    _check(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps)[0]


class LayerNorm(torch.nn.Module):
    """Layer norm with a weight and, unless `bias=False`, a bias; equivalent to torch.nn.LayerNorm
    over one dimension."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype)) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `layer_norm`."""
        return layer_norm(x, self.weight, self.bias, self.eps)
