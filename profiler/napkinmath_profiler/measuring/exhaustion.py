"""Which errors mean that memory ran out: PyTorch's own, and those of whoever asks the driver or the
system past its allocator."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

# The driver's answer, cuBLAS's and cuDNN's when a handle or a workspace finds no room, and the CPU
# allocator's (c10/core/impl/alloc_cpu.cpp).
PHRASES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)


def is_exhaustion(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, of the device or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)


@contextmanager
def exhaustion_as_one_error() -> Generator[None]:
    """Raise every error that says that memory ran out as ``torch.OutOfMemoryError``, with its own
    words; let others pass."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_exhaustion(error):
            raise
        raise torch.OutOfMemoryError(str(error) or "the host's memory ran out") from error
