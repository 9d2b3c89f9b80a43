"""Rotary position embedding of q and k in one launch, in place or into new tensors.

Over the two halves of the first `rotary` values of a head:  y1 = x1 cos1 - x2 sin1,  y2 = x2 cos2 + x1 sin2;  the rest stays.
Computed in fp32 and rounded once. The gradient is the transposed rotation. Saved: cos and sin,
which all layers share; q and k are not, so they may be overwritten. Bytes: q and k once in and once
out. Source: Su et al. 2021 (arXiv 2104.09864), halves as in GPT-NeoX.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..backend import runs_triton
from .eager import short_way

FALLBACK = "transformers' apply_rotary_pos_emb"


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _reference(
    x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> None:
    half = cos.shape[-1] // 2
    wide = _compute(x[..., : 2 * half])
    x1, x2 = wide[..., :half], wide[..., half:]
    cos, sin = cos.to(wide.dtype).unsqueeze(1), sin.to(wide.dtype).unsqueeze(1)
    cos1, cos2, sin1, sin2 = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    if inverse:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    out[..., :half].copy_(y1)
    out[..., half : 2 * half].copy_(y2)


def _packed_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _write(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
) -> None:
    if runs_triton("rope", q):
        from ..triton_kernels.rope import rope

        rope(q, k, q_out, k_out, cos.contiguous(), sin.contiguous(), inverse)
    else:
        _reference(q, q_out, cos, sin, inverse)
        _reference(k, k_out, cos, sin, inverse)


@torch.library.custom_op("napkinmath::rope", mutates_args=())
def _rope_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = _packed_last(q), _packed_last(k)
    outs: list[torch.Tensor] = []
    for x in (q, k):
        out = torch.empty_like(
            x
        )  # in x's order of memory: attention hands its own output back in q's
        out[..., cos.shape[-1] :] = x[..., cos.shape[-1] :]
        outs.append(out)
    _write(q, k, outs[0], outs[1], cos, sin, inverse)
    return outs[0], outs[1]


@_rope_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.custom_op("napkinmath::rope_", mutates_args=("q", "k"))
def _rope_in_place_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    shared = q.numel() > 0 and q.data_ptr() == k.data_ptr()
    repeated = any(
        stride == 0 and size > 1
        for x in (q, k)
        for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    given = (
        "q and k in the same memory"
        if shared
        else f"expanded strides {q.stride()} and {k.stride()}"
    )
    checks.require(
        not shared and not repeated,
        "rope",
        given,
        "memory of its own for every value",
        "inplace=False",
    )
    _write(q, k, q, k, cos, sin, False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _autograd(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dq, dk = _rope(dq, dk, *ctx.saved_tensors, not ctx.inverse)
    return dq, dk, None, None, None


_rope = short_way(_rope_op, _setup, _autograd)


class _RopeInPlace(torch.autograd.Function):
    """The in-place op with a gradient: torch.library takes an autograd formula for functional ops
    only.

    Returns aliases of q and k and does not mark them dirty, because autograd takes one view at
    most, and both are views of projections. The version counter still rises, so an op that saved q
    or k before raises in its backward.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = q.detach(), k.detach()
        _rope_in_place_op(q, k, cos, sin)
        return q, k

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk = _rope(gradients[0], gradients[1], *ctx.saved_tensors, True)
        return dq, dk, None, None


@checks.remembered
def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    checks.require_tensors("rope", FALLBACK, q=q, k=k, cos=cos, sin=sin)
    checks.require_dtype("rope", "q", q, FALLBACK)
    checks.require_dtype("rope", "cos", cos, FALLBACK)
    checks.require_dtype("rope", "sin", sin, FALLBACK)
    trained = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    checks.require(not trained, "rope", "tables that require a gradient", "constants", FALLBACK)
    checks.require_dtype("rope", "k", k, FALLBACK, (q.dtype,))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    fits = q.dim() == 4 and k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    checks.require(
        fits,
        "rope",
        shapes,
        "(batch, heads, tokens, head size) with equal batch, tokens and size",
        FALLBACK,
    )
    tables = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for q {tuple(q.shape)}"
    rotary = cos.shape[-1] if cos.dim() == 3 else 0
    fits = (
        cos.shape == sin.shape
        and 0 < rotary <= q.shape[3]
        and rotary % 2 == 0
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[2]
    )
    checks.require(
        fits,
        "rope",
        tables,
        f"(1 or {q.shape[0]}, {q.shape[2]}, an even number up to {q.shape[3]})",
        FALLBACK,
    )
    checks.require_same_device("rope", FALLBACK, q=q, k=k, cos=cos, sin=sin)


def _check_in_place(q: torch.Tensor, k: torch.Tensor) -> None:
    leaf = torch.is_grad_enabled() and any(x.requires_grad and x.is_leaf for x in (q, k))
    packed = q.stride(-1) == 1 and k.stride(-1) == 1
    strides = f"strides {q.stride()} and {k.stride()}" + (
        " of a leaf that requires a gradient" if leaf else ""
    )
    checks.require(
        packed and not leaf,
        "rope",
        strides,
        "a contiguous last dimension, and no leaf",
        "inplace=False",
    )


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inplace: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rotated q, rotated k), q (batch, heads, tokens, size) and k likewise with its own heads;
    cos, sin (1 or batch, tokens, rotary).

    `inplace` overwrites q and k, which is sound when what made them does not need them, as linears
    do not. Raises KernelInputError.
    """
    _check(q, k, cos, sin)
    if inplace:
        _check_in_place(q, k)
        return _RopeInPlace.apply(q, k, cos, sin)
    return _rope(q, k, cos, sin, False)


class RotaryEmbedding(torch.nn.Module):
    """Applies `rope` with the tables of positions 0, 1, ... of a base frequency."""

    def __init__(self, head_size: int, base: float = 10000.0) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        self.frequency: torch.Tensor
        self.register_buffer("frequency", frequency, persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates by positions 0 to tokens - 1."""
        angle = torch.outer(
            torch.arange(q.shape[2], device=q.device, dtype=torch.float32), self.frequency
        )
        angle = torch.cat((angle, angle), -1)[None]
        return rope(q, k, angle.cos(), angle.sin())
