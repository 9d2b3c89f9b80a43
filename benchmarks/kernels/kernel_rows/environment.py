"""What a run was made on, and the ceilings that its shares refer to."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from kernel_rows.timing import Clock

PEERS = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "cut-cross-entropy",
    "flash-attn",
    "unsloth",
)


def version_of(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: torch.device) -> dict[str, Any]:
    """GPU, driver-side versions and packages."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PEERS},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = (
            "cpu (a trial of the benchmark with tiny shapes: says nothing about a GPU)"
        )
    return found


def measure_ceilings(clock: Clock, tiny: bool) -> dict[str, float]:
    """Bytes/s of a device copy (read plus written) and FLOP/s of a square bf16 product."""
    length = 2**16 if tiny else 2**28
    pairs = [
        (torch.randn(length, device=clock.device), torch.empty(length, device=clock.device))
        for _ in range(2)
    ]
    copies = sorted(clock.time_calls(lambda pair: pair[1].copy_(pair[0]), pairs, 1.0, most=50))
    side = 64 if tiny else 8192
    matrices = [torch.randn(side, side, device=clock.device).bfloat16() for _ in range(4)]
    products = sorted(
        clock.time_calls(
            lambda i: matrices[i] @ matrices[(i + 1) % 4], list(range(4)), 1.0, most=50
        )
    )
    return {
        "copy_bytes_per_s": 8 * length / copies[len(copies) // 2],
        "matmul_flops_per_s": 2 * side**3 / products[len(products) // 2],
    }
