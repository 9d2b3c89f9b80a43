"""torch.autocast for ops that multiply matrices: the custom ops are below it, so their inputs are cast here."""

from __future__ import annotations

import torch


def to_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """`x` in autocast's dtype where autocast is on for its device, else as it is. float64 stays, as in torch's own lists."""
    if x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
