"""The package: its names, what importing it loads, and where it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import napkinmath_kernels
import pytest
import torch
from napkinmath_kernels import backend as backends
from napkinmath_kernels import checks
from napkinmath_kernels.backend import Backend, choose_backend, use_backend
from napkinmath_kernels.errors import KernelInputError

KERNELS = Path(napkinmath_kernels.__file__).parents[1]


def loaded_after(code):
    program = (
        f"import sys; sys.path.insert(0, {str(KERNELS)!r}); {code}; print(' '.join(m for m in"
        " ('torch', 'triton', 'transformers', 'napkinmath') if m in sys.modules))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


def test_importing_loads_nothing_heavy_and_patches_nothing():
    assert loaded_after("import napkinmath_kernels") == []
    assert "triton" not in loaded_after("import napkinmath_kernels.errors")
    assert not {"transformers", "napkinmath"} & set(
        loaded_after("from napkinmath_kernels import patch, flash_attention, swiglu, costs")
    )


@pytest.mark.parametrize("name", napkinmath_kernels.__all__)
def test_every_public_name_is_found(name):
    found = getattr(napkinmath_kernels, name)
    assert callable(found) and found.__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such"):
        _ = napkinmath_kernels.no_such


class FakeGpuTensor:
    """What choose_backend asks of a tensor."""

    is_cuda = True

    def __init__(self, kind="cuda"):
        self.device = torch.device(kind)

    def get_device(self):
        return 0


def test_an_old_gpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(backends, "_capability", lambda index: (7, 5))
    with pytest.raises(
        KernelInputError, match=r"compute capability 7\.5.*8\.0 or newer.*Backend\.REFERENCE"
    ):
        choose_backend("op", FakeGpuTensor())
    monkeypatch.setattr(backends, "_capability", lambda index: (8, 6))
    assert choose_backend("op", FakeGpuTensor()) is Backend.TRITON


def test_a_missing_triton_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(backends, "is_triton_installed", lambda: False)
    with pytest.raises(KernelInputError, match="without triton"):
        choose_backend("op", FakeGpuTensor())
    with use_backend(Backend.REFERENCE):
        assert choose_backend("op", FakeGpuTensor()) is Backend.REFERENCE


def test_the_reference_path_takes_float64_on_a_gpu_where_it_is_asked_for(monkeypatch):
    """The benchmark believes a kernel by this path in float64, on the GPU itself."""
    tensor = FakeGpuTensor()
    tensor.dtype = torch.float64
    with pytest.raises(KernelInputError, match="float64"):
        checks.require_dtype("op", "x", tensor, "none")
    with use_backend(Backend.REFERENCE):
        checks.require_dtype("op", "x", tensor, "none")


def test_an_unknown_device_is_refused():
    with pytest.raises(KernelInputError, match="xpu"):
        choose_backend("op", FakeGpuTensor("xpu"))


def test_the_interpreter_must_be_switched_on_before(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with use_backend(Backend.TRITON), pytest.raises(KernelInputError, match="TRITON_INTERPRET=1"):
        choose_backend("op", torch.ones(1))


def test_a_forced_backend_holds_in_every_thread():
    """Autograd runs the backward of what is on a GPU in a thread of its own."""
    import threading

    seen = []
    with use_backend(Backend.TRITON):
        thread = threading.Thread(target=lambda: seen.append(choose_backend("op", torch.ones(1))))
        thread.start()
        thread.join()
    assert seen == [Backend.TRITON] and choose_backend("op", torch.ones(1)) is Backend.REFERENCE
