"""Which implementation runs: the Triton kernels, or the torch reference path that also runs on a
CPU.

The choice is made per call from where the tensors are. CUDA tensors take Triton; CPU tensors take
the reference path, unless `use_backend(Backend.TRITON)` asks for Triton's interpreter (which needs
TRITON_INTERPRET=1 set before the first launch).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.util
import os
from collections.abc import Generator

import torch

from .errors import KernelInputError

# : Tensor-core bf16 and asynchronous copies, which every shipped configuration assumes, start with
# compute capability 8.0.
OLDEST_CAPABILITY = (8, 0)
REFERENCE_FALLBACK = "use_backend(Backend.REFERENCE)"


class Backend(enum.Enum):
    """An implementation of the ops."""

    TRITON = "triton"
    REFERENCE = "reference"


# : Of the whole process: autograd runs the backward of what is on a GPU in a thread of its own,
# which sees no thread's or context's variables.
_forced: Backend | None = None


@contextlib.contextmanager
def use_backend(backend: Backend) -> Generator[None]:
    """Runs every op inside the block on `backend`, in all threads; a backward that should match
    must run inside the block too."""
    global _forced
    if not isinstance(backend, Backend):
        raise KernelInputError(
            "use_backend",
            repr(backend),
            "Backend.TRITON or Backend.REFERENCE",
            "no block: tensors decide",
        )
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def reference_is_forced() -> bool:
    """True inside `use_backend(Backend.REFERENCE)`: plain torch, whatever the device."""
    return _forced is Backend.REFERENCE


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
    """Compute capability of the tensor's GPU; (9, 0) for a CPU tensor, so the interpreter runs what
    an H100 would."""
    return _capability(tensor.get_device()) if tensor.is_cuda else (9, 0)


def acts_as_gpu(tensor: torch.Tensor) -> bool:
    """True for a CUDA tensor, and for a meta tensor, which stands for one: a trace asks what a GPU
    would do."""
    return tensor.device.type in ("cuda", "meta")


@torch.compiler.assume_constant_result
def _why_not(kind: str, index: int) -> tuple[str, str] | None:
    """What stands in the way of Triton on a device, and what is accepted instead; None if nothing
    does. A constant to torch.compile."""
    if not is_triton_installed():
        return "an environment without triton", "triton >= 3.6"
    if kind == "cpu":
        return (
            None
            if is_interpreted()
            else ("a CPU tensor for the Triton backend", "TRITON_INTERPRET=1 or a CUDA tensor")
        )
    if kind == "meta":
        return None
    if kind != "cuda":
        return f"a tensor on {kind}", "cuda or cpu"
    major, minor = _capability(index)
    if (major, minor) < OLDEST_CAPABILITY:
        return f"a GPU of compute capability {major}.{minor}", "8.0 or newer"
    return None


def choose_backend(op: str, tensor: torch.Tensor) -> Backend:
    """Backend for a call of `op` on `tensor`.

    Raises KernelInputError when the kernels cannot run there: no Triton, a GPU older than
    capability 8.0, an unknown device, or the interpreter asked for without TRITON_INTERPRET=1.
    """
    kind = tensor.device.type
    if _forced is Backend.REFERENCE or (_forced is None and kind == "cpu"):
        return Backend.REFERENCE
    fault = _why_not(kind, tensor.get_device() if kind == "cuda" else 0)
    if fault is not None:
        raise KernelInputError(op, *fault, REFERENCE_FALLBACK)
    return Backend.TRITON


def runs_triton(op: str, tensor: torch.Tensor) -> bool:
    """True if `op` on `tensor` launches Triton kernels."""
    return choose_backend(op, tensor) is Backend.TRITON
