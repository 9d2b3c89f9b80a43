"""Checks at the door: each raises one line (given, accepted, fallback) before anything is launched."""

from __future__ import annotations

import torch

from .backend import reference_is_forced
from .errors import KernelInputError

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """The dtypes as a person writes them: `bfloat16, float16`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def require(condition: bool, op: str, given: str, accepted: str, fallback: str) -> None:
    """Raises KernelInputError unless `condition` holds."""
    if not condition:
        raise KernelInputError(op, given, accepted, fallback)


def require_dtype(op: str, name: str, tensor: torch.Tensor, fallback: str, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> None:
    """Accepts `dtypes`, and float64 where the reference path takes it: on a CPU, and on a GPU when that path is asked for."""
    takes_double = tensor.device.type in ("cpu", "meta") or reference_is_forced()
    if tensor.dtype in dtypes or (tensor.dtype is torch.float64 and takes_double):
        return
    raise KernelInputError(op, f"{name} of dtype {dtype_names((tensor.dtype,))}", f"{dtype_names(dtypes)} (float64 on cpu)", fallback)


def require_same_device(op: str, fallback: str, **tensors: torch.Tensor | None) -> None:
    """All tensors that are given live on one device."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise KernelInputError(op, places, "all on one device", fallback)


def require_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], fallback: str) -> None:
    """The tensor has exactly this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise KernelInputError(op, f"{name} of shape {tuple(tensor.shape)}", str(tuple(shape)), fallback)
