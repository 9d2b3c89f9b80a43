"""Kernel tests run the Triton kernels in its interpreter, and beside it the torch reference path.

A process has either the interpreter or the compiler. With NAPKINMATH_GPU_TESTS=1 and a GPU it has
the compiler: then run `pytest tests/kernels/test_on_gpu.py`; the other files make CPU tensors for
the interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ON_GPU = os.environ.get("NAPKINMATH_GPU_TESTS") == "1" and torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before the first @triton.jit; the kernels are imported on the first launch only
    )
sys.path.insert(
    0, str(Path(__file__).parent)
)  # for kernel_numerics; the importlib import mode adds no path

from napkinmath_kernels.backend import Backend, use_backend  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=list(Backend), ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each test that asks for it runs once on the kernels and once on the reference path."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def triton_backend() -> Iterator[Backend]:
    """The kernels: on a GPU, or in the interpreter."""
    with use_backend(Backend.TRITON):
        yield Backend.TRITON


@pytest.fixture
def device() -> str:
    """cuda if the process has Triton's compiler and a GPU."""
    return DEVICE
