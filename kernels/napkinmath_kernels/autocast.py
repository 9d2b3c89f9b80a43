"""torch.autocast for ops that multiply matrices: the custom ops are below it, so their inputs are
cast here."""

from __future__ import annotations

import torch


def to_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """`x` in autocast's dtype where autocast is on for its device, else as it is. float64 stays, as
    in torch's own lists."""
    kind = x.device.type
    if kind == "meta":  # it stands for a GPU's
        kind = "cuda"
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
