"""Checks at the door: each raises one line (given, accepted, fallback) before anything is
launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

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


def require_tensors(op: str, fallback: str, **tensors: Any) -> None:
    """Each is a tensor with strides, and without a tangent: the ops have no forward-mode
    derivative, and torch would take it for zero."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise KernelInputError(op, f"{name} of type {type(x).__name__}", "a tensor", fallback)
        if x.layout is not torch.strided:
            raise KernelInputError(
                op, f"{name} of layout {x.layout}", "a dense tensor", f"{name}.to_dense()"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise KernelInputError(
                op, f"{name} with a forward-mode tangent", "reverse mode", fallback
            )


def is_number(value: Any) -> bool:
    """True for a finite int or float, also one that torch.compile holds as a symbol."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """True for an int, also one that torch.compile holds as a symbol."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def refuse_second_derivative(op: str, fallback: str) -> None:
    """Raises inside a backward with create_graph=True: the gradients' own derivative is not
    there."""
    if torch.is_grad_enabled():
        raise KernelInputError(
            op, "a backward with create_graph=True", "first derivatives", fallback
        )


def require_dtype(
    op: str,
    name: str,
    tensor: torch.Tensor,
    fallback: str,
    dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES,
) -> None:
    """Accepts `dtypes`, and float64 where the reference path takes it: on a CPU, and on a GPU when
    that path is asked for."""
    takes_double = tensor.device.type in ("cpu", "meta") or reference_is_forced()
    if tensor.dtype in dtypes or (tensor.dtype is torch.float64 and takes_double):
        return
    raise KernelInputError(
        op,
        f"{name} of dtype {dtype_names((tensor.dtype,))}",
        f"{dtype_names(dtypes)} (float64 on cpu)",
        fallback,
    )


def require_same_device(op: str, fallback: str, **tensors: torch.Tensor | None) -> None:
    """All tensors that are given live on one device."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise KernelInputError(op, places, "all on one device", fallback)


def require_shape(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], fallback: str
) -> None:
    """The tensor has exactly this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise KernelInputError(
            op, f"{name} of shape {tuple(tensor.shape)}", str(tuple(shape)), fallback
        )


MOST_REMEMBERED = 4096


def _kind(argument: Any) -> Any:
    """What a check looks at in an argument, hashable."""
    if isinstance(argument, torch.Tensor):
        return (
            argument.dtype,
            argument.shape,
            argument.device,
            argument.layout,
            argument.requires_grad,
        )
    return type(argument), argument


def remembered(check: Callable[..., None]) -> Callable[..., None]:
    """The check, run once for each combination of dtypes, shapes, devices, layouts, who trains, and
    other values; it may look at nothing else."""
    passed: set[Any] = set()

    @functools.wraps(check)
    def at_the_door(*arguments: Any) -> None:
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return check(*arguments)
        try:
            key = (reference_is_forced(), torch.is_grad_enabled(), *map(_kind, arguments))
            if key in passed:
                return None
        except TypeError:  # symbolic sizes, and what a user gives by mistake
            return check(*arguments)
        check(*arguments)
        if len(passed) >= MOST_REMEMBERED:
            passed.clear()
        passed.add(key)
        return None

    return at_the_door
