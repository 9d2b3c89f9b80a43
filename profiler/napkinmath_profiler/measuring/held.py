"""What a model and its optimizer hold, by role."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from napkinmath_profiler.tracing.quantized_model import quantization_constants


def held_tensors(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, gradients, quantization constants, buffers and optimizer states, each with its
    role."""
    if model is not None:
        for parameter in model.parameters():
            yield "parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for _, constant in quantization_constants(model):
            yield "quantization constants", constant
        for buffer in model.buffers():
            yield "buffers", buffer
    if optimizer is not None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield "optimizer states", value


def held_by_role(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Bytes by role, each storage once."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for role, tensor in held_tensors(model, optimizer):
        if tensor.is_meta:
            continue
        key = tensor.untyped_storage().data_ptr()
        if key not in seen:
            seen.add(key)
            found[role] = found.get(role, 0) + tensor.untyped_storage().nbytes()
    return found
