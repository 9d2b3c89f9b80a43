"""Launches as a GPU would make them compile: arguments of 1, and more heads times sequences than
one dimension of a grid takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
