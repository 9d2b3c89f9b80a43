"""Which implementation runs: the Triton kernels, or the torch reference path that also runs on a CPU.

The choice is made per call from where the tensors are. CUDA tensors take Triton; CPU tensors take the reference path,
unless `use_backend(Backend.TRITON)` asks for Triton's interpreter (which needs TRITON_INTERPRET=1 set before the first launch).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from .errors import KernelInputError

#: Tensor-core bf16 and asynchronous copies, which every shipped configuration assumes, start with compute capability 8.0.
OLDEST_CAPABILITY = (8, 0)
REFERENCE_FALLBACK = "use_backend(Backend.REFERENCE)"


class Backend(enum.Enum):
    """An implementation of the ops."""

    TRITON = "triton"
    REFERENCE = "reference"


_forced: ContextVar[Backend | None] = ContextVar("napkinmath_kernels_backend", default=None)


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Runs every op inside the block on `backend`; a backward that should match must run inside the block too."""
    token = _forced.set(Backend(backend))
    try:
        yield
    finally:
        _forced.reset(token)


def reference_is_forced() -> bool:
    """True inside `use_backend(Backend.REFERENCE)`: plain torch, whatever the device."""
    return _forced.get() is Backend.REFERENCE


def is_interpreted() -> bool:
    """True if Triton kernels run in its CPU interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_triton_installed() -> bool:
    """True if `import triton` can work."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def capability_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's GPU; (9, 0) for a CPU tensor, so the interpreter runs what an H100 would."""
    return _capability(tensor.get_device()) if tensor.is_cuda else (9, 0)


def acts_as_gpu(tensor: torch.Tensor) -> bool:
    """True for a CUDA tensor, and for a meta tensor, which stands for one: a trace asks what a GPU would do."""
    return tensor.device.type in ("cuda", "meta")


def choose_backend(op: str, tensor: torch.Tensor) -> Backend:
    """Backend for a call of `op` on `tensor`.

    Raises KernelInputError when the kernels cannot run there: no Triton, a GPU older than capability 8.0, float64 on a GPU,
    an unknown device, or the interpreter asked for without TRITON_INTERPRET=1.
    """
    forced = _forced.get()
    if forced is Backend.REFERENCE or (forced is None and tensor.device.type == "cpu"):
        return Backend.REFERENCE
    if not is_triton_installed():
        raise KernelInputError(op, "an environment without triton", "triton >= 3.6", REFERENCE_FALLBACK)
    if tensor.device.type == "cpu":
        if not is_interpreted():
            raise KernelInputError(op, "a CPU tensor for the Triton backend", "TRITON_INTERPRET=1 or a CUDA tensor", REFERENCE_FALLBACK)
    elif tensor.device.type != "cuda":
        if tensor.device.type != "meta":
            raise KernelInputError(op, f"a tensor on {tensor.device}", "cuda or cpu", REFERENCE_FALLBACK)
    elif capability_of(tensor) < OLDEST_CAPABILITY:
        major, minor = capability_of(tensor)
        raise KernelInputError(op, f"a GPU of compute capability {major}.{minor}", "8.0 or newer", REFERENCE_FALLBACK)
    return Backend.TRITON


def runs_triton(op: str, tensor: torch.Tensor) -> bool:
    """True if `op` on `tensor` launches Triton kernels."""
    return choose_backend(op, tensor) is Backend.TRITON
