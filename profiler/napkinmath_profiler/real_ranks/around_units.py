"""Reentrant checkpoints around FSDP's units, as transformers made them before 4.53."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_around_units(model: nn.Module) -> None:
    """Every wrapped layer recomputed from outside, its unit's hooks with it."""
    for module in list(model.modules()):
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            for index, layer in enumerate(layers):
                layers[index] = Recomputed(layer)


class Recomputed(nn.Module):
    """A module whose forward is a reentrant checkpoint of another's."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def __getattr__(self, name: str) -> Any:
        """Also what the wrapped layer says of itself (its kind of attention)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            unit: Any = super().__getattr__("unit")
            return getattr(unit.module, name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The unit's result, recomputed in the backward."""
        return checkpoint(partial(self.unit, **kwargs), hidden, *args, use_reentrant=True)
