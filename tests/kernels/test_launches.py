"""Launches as a GPU would make them compile: arguments of 1, and more heads times sequences than
one dimension of a grid takes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from napkinmath_kernels.triton_kernels import launch
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import native_specialize_impl

HERE = Path(__file__).resolve().parent
KERNELS = {
    "_rms_norm_forward",
    "_rms_norm_forward_narrow",
    "_rms_norm_backward",
    "_rms_norm_backward_narrow",
    "_layer_norm_forward",
    "_layer_norm_backward",
    "_gated_forward",
    "_gated_backward",
    "_rope",
    "_cross_entropy",
    "_scale",
    "_flash_forward",
    "_flash_delta",
    "_flash_backward_dkdv",
    "_flash_backward_dq",
    "_dequantize",
    "_quantize",
    "_dropout",
    "_expert_down",
    "_expert_up",
    "_expert_gradient",
}


def test_every_kernel_compiles_with_the_arguments_that_a_launch_specialises():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parents[1] / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    run = subprocess.run(
        [sys.executable, str(HERE / "launches_without_gpu.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert set(run.stdout.split()) == KERNELS


def _arguments():
    edges = (2**4, 2**31, 2**32, 2**63)
    near = {
        sign * edge + step for edge in edges for sign in (1, -1) for step in (-16, -1, 0, 1, 16)
    }
    numbers = [n for n in near | {0, 1, 2, 8} if -(2**63) <= n < 2**64]
    types = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8)
    buffers = [torch.zeros(64, dtype=kind) for kind in types]
    return [*numbers, 1.0, 0.5, None, *buffers, *(buffer[1:] for buffer in buffers)]


def test_a_compiled_kernel_is_found_again_only_where_triton_would_take_the_same():
    """What Triton compiles apart is apart; nothing of it may be launched with another's code."""
    for a, b in itertools.combinations(_arguments(), 2):
        first, second = (native_specialize_impl(BaseBackend, x, False, True, True) for x in (a, b))
        if first != second:
            assert launch.specialisation((a,)) != launch.specialisation((b,)), (a, b)


class Kernel:
    """Stands for a jitted kernel and for what it compiles to; notes how it was launched."""

    arg_names = ("x_ptr", "n", "BLOCK")

    def __init__(self):
        self.launches, self.result = [], self

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launches.append((grid, arguments[1:], options))
            return self.result

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    return Kernel()


def test_the_second_launch_goes_straight_to_the_compiled_kernel_with_its_constants(kernel):
    x, options = torch.zeros(64), {"BLOCK": 8, "num_warps": 4}
    for n in (32, 48):
        launch._run_compiled(kernel, (n, 2), (x, n), options, 0)
    assert kernel.launches == [((32, 2), (32,), options), ((48, 2, 1), (48, 8), {})]
    for n, at, device, warps in ((33, x, 0, 4), (48, x[1:], 0, 4), (48, x, 1, 4), (48, x, 0, 8)):
        options = {"BLOCK": 8, "num_warps": warps}
        launch._run_compiled(kernel, (1,), (at, n), options, device)
        assert kernel.launches[-1] == ((1,), (n,), options)


def test_what_was_not_compiled_or_is_not_understood_is_launched_by_triton(kernel):
    x, options = torch.zeros(64), {"BLOCK": 8}
    for arguments in ((x, True), (x, object())):
        for _ in range(2):
            launch._run_compiled(kernel, (1,), arguments, options, 0)
            assert kernel.launches[-1][2] == options
    for _ in range(2):  # a constant that only its default gives
        launch._run_compiled(kernel, (1,), (x, 5), {"num_warps": 4}, 0)
        assert kernel.launches[-1][2] == {"num_warps": 4}
    kernel.result = None
    for _ in range(2):
        launch._run_compiled(kernel, (1,), (x, 7), options, 0)
        assert kernel.launches[-1][2] == options
