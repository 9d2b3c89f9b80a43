"""The stamp of a measurement: when, on what device and driver, with which libraries; what a later
estimate compares."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform

import napkinmath
import torch
from napkinmath.calibration import local_machine

from napkinmath_profiler.calibration.devices import Device

LIBRARIES = (
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "triton",
    "flash-attn",
    "liger-kernel",
)


def stamp_of(device: Device) -> dict[str, str]:
    """Everything that may change what was measured, as text; what is not there is left out."""
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device.name,
        "napkinmath": napkinmath.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.is_cuda:
        found |= _of_gpu(device)
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"):
        if os.environ.get(name):
            found[name] = os.environ[name]
    return found


def _of_gpu(device: Device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device.torch_device)
    found = {
        "driver": local_machine.driver_version(),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_sms": str(properties.multi_processor_count),
        "memory_bytes": str(properties.total_memory),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }
    return {key: value for key, value in found.items() if value}
