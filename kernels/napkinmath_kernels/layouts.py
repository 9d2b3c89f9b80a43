"""Memory order of attention tensors: (batch, heads, tokens, size) with a token's heads side by
side, as projections make them."""

from __future__ import annotations

import torch


def token_major_strides(shape: torch.Size) -> tuple[int, int, int, int]:
    """Strides of (batch, heads, tokens, size) laid out as (batch, tokens, heads, size)."""
    _, heads, tokens, size = shape
    return tokens * heads * size, size, heads * size, 1


def empty_token_major(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of x's shape, dtype and device; `.transpose(1, 2).flatten(2)` of it needs no
    copy."""
    return torch.empty_strided(
        x.shape, token_major_strides(x.shape), dtype=x.dtype, device=x.device
    )


def to_token_major(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x reshaped and cast to `like`, in that order of memory."""
    return empty_token_major(like).copy_(x.reshape(like.shape))
