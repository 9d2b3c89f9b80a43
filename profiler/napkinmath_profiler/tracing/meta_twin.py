"""A copy of a live module and its optimizer on the meta device: same code, same ties, no bytes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def meta_twin(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Deep copies in which every parameter, buffer, gradient and optimizer state is a meta tensor
    of the same type and shape."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        twin = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        if parameter.grad is not None:
            twin.grad = torch.empty_like(parameter.grad, device="meta")
        memo[id(parameter)] = twin
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    if optimizer is not None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    memo[id(value)] = torch.empty_like(value, device="meta")
    return copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
