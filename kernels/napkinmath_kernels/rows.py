"""Rows of a tensor: the (rows, hidden) view that the row-wise ops work on."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as (rows, hidden) with a contiguous last dimension: a view where the strides allow one,
    otherwise a copy."""
    flat = x.reshape(-1, x.shape[-1])
    return (
        flat
        if flat.stride(-1) == 1 or (flat.shape[-1] == 1 and flat.is_contiguous())
        else flat.contiguous()
    )
