"""An MLP over tiles of tokens: its wide intermediates exist for one tile at a time, in the forward
and in the backward.

The MLP treats tokens alone, so tiles change nothing but the order of sums in weight gradients.
Saved: x. Temporaries: one tile's intermediates. Time: the MLP's forward once more. Source: Bekman
et al. 2025 (ALST, arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..errors import KernelInputError


def run_in_tiles(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tile_tokens: int
) -> torch.Tensor:
    """function(x) of x (..., tokens, hidden), so many tokens at a time, each tile made again in the
    backward."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= tile_tokens:
        return function(x)
    tiles = rows.split(tile_tokens)
    if torch.is_grad_enabled():
        made = [checkpoint(function, tile, use_reentrant=False) for tile in tiles]
    else:
        made = [function(tile) for tile in tiles]
    return torch.cat(made).view(*x.shape[:-1], -1)


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
        return run_in_tiles(self.mlp, x, self.tile_tokens)


@dataclass(eq=False)
class TiledForward:
    """A module's forward in so many tiles; 0 makes ALST's choice, a tile for every hidden-size tokens
    of a sequence."""

    own: Callable[..., Any]
    num_tiles: int

    def __call__(self, x: torch.Tensor) -> Any:
        length, hidden = x.shape[-2:]
        num_tiles = self.num_tiles or max(1, -(-length // hidden))
        return run_in_tiles(self.own, x, max(1, -(-x.numel() // hidden // num_tiles)))
