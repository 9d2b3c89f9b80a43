"""What a model and its optimizer hold, by role."""

from __future__ import annotations

import torch
from torch import nn


def held_by_role(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of parameters, gradients, buffers and optimizer states, each storage once."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def add(role: str, tensor: torch.Tensor | None) -> None:
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and (key := tensor.untyped_storage().data_ptr()) not in seen:
            seen.add(key)
            found[role] = found.get(role, 0) + tensor.untyped_storage().nbytes()

    if model is not None:
        for parameter in model.parameters():
            add("parameters", parameter)
            add("gradients", parameter.grad)
        for buffer in model.buffers():
            add("buffers", buffer)
    if optimizer is not None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                add("optimizer states", value)
    return found
