"""A frozen MLP over tiles of a long context against the same MLP at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from napkinmath_kernels.checkpoint.tiled import run_in_tiles
from napkinmath_kernels.ops.gated import swiglu

from kernel_rows.goals import NUM_TILES, TILES, TILES_SHAPE, WHOLE, tiles_flops, tiles_name
from kernel_rows.timing import Case


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward + backward to x; each tile is made again in the backward."""
    tokens, hidden, width = (16, 32, 64) if tiny else TILES_SHAPE
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = ((torch.randn(s, device=device) / s[1] ** 0.5).bfloat16() for s in shapes)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down)

    def make() -> Any:
        x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        return x, torch.randn(tokens, hidden, device=device).bfloat16()

    contestants: dict[str, Any] = {
        "napkinmath": lambda x: run_in_tiles(mlp, x, -(-tokens // NUM_TILES)),
        WHOLE: mlp,
    }
    calls = {
        name: lambda given, f=f: torch.autograd.grad(f(given[0]), (given[0],), given[1])
        for name, f in contestants.items()
    }
    return [
        Case(
            "mlp in tiles fwd+bwd",
            tiles_name(tokens, hidden, width),
            make,
            calls,
            4 * tokens * hidden,
            flops=tiles_flops(tokens, hidden, width),
            goals=TILES,
        )
    ]
