"""An MLP over tiles of tokens: its wide intermediates exist for one tile at a time, in the forward
and in the backward.

The MLP treats tokens alone, so tiles change nothing but the order of sums in weight gradients.
Saved: x. Temporaries: one tile's intermediates. Time: the MLP's forward once more. Source: Bekman
et al. 2025 (ALST, arXiv 2506.13996).
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from ..errors import KernelInputError


class TiledMLP(torch.nn.Module):
    """Runs `mlp` on `tile_tokens` tokens at a time, recomputing each tile in the backward; (...,
    tokens, hidden) in and out."""

    def __init__(self, mlp: torch.nn.Module, tile_tokens: int) -> None:
        super().__init__()
        if tile_tokens < 1:
            raise KernelInputError(
                "TiledMLP", f"tile_tokens {tile_tokens}", "1 or more tokens", "the MLP itself"
            )
        self.mlp = mlp
        self.tile_tokens = tile_tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """mlp(x)."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] <= self.tile_tokens:
            return self.mlp(x)
        if not torch.is_grad_enabled():
            return torch.cat([self.mlp(tile) for tile in rows.split(self.tile_tokens)]).view(
                *x.shape[:-1], -1
            )
        tiles = [
            checkpoint(self.mlp, tile, use_reentrant=False) for tile in rows.split(self.tile_tokens)
        ]
        return torch.cat(tiles).view(*x.shape[:-1], -1)
