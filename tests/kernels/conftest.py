"""Kernel tests run the Triton kernels in its interpreter where there is no GPU, and beside it the torch reference path."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first @triton.jit; the kernels are imported on the first launch only
sys.path.insert(0, str(Path(__file__).parent))  # for kernel_numerics; the importlib import mode adds no path

from napkinmath_kernels.backend import Backend, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    """cuda where there is one."""
    return DEVICE
