"""A device that the catalog lacks, described by what was measured on it: enough for the time model
to start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from napkinmath.calibration.calibration import described_gpu
from napkinmath.config.hardware import Gpu

from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.op_points import OpPoint

CACHE_SIZE = "/sys/devices/system/cpu/cpu0/cache/index3/size"
TYPICAL_L2_BYTES = 32 << 20
TYPICAL_HZ = 1.5e9  # of a GPU whose clock torch does not tell; the fitted rates carry what matters
COUNTED_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")


def device_facts(device: Device, points: Sequence[OpPoint]) -> dict[str, Any]:
    """The `device` object of a calibration file."""
    copies = [p for p in points if p.case.op == "copy" and p.timing is not None]
    largest = max(copies, key=lambda p: p.case.moved, default=None)
    bandwidth = largest.bytes_per_s if largest is not None else 1e10
    links = [
        p.bytes_per_s
        for p in points
        if p.case.op == "host copy"
        and p.timing is not None
        and p.case.arguments["memory"] == "pinned"
    ]
    found = {
        "kind": device.torch_device.type,
        "memory_bytes": device.memory()[1],
        "bandwidth_bytes_per_s": bandwidth,
        "dense_flops": _dense(points),
        "host_bytes_per_s": max(links, default=bandwidth / 2),
    }
    return found | (_of_gpu(device) if device.is_cuda else _of_cpu())


def _of_cpu() -> dict[str, Any]:
    return {
        "vendor": "cpu",
        "num_sms": torch.get_num_threads(),
        "hz": _cpu_hz(),
        "l2_bytes": _cpu_cache(),
    }


def gpu_of(device: Device, points: Sequence[OpPoint]) -> tuple[Gpu, dict[str, Any]]:
    """The catalog's GPU and nothing, or one made of the facts and those facts."""
    known = device.catalogued
    if known is not None:
        return known, {}
    facts = device_facts(device, points)
    return described_gpu(device.name, facts), facts


def _dense(points: Sequence[OpPoint]) -> dict[str, float]:
    best: dict[str, float] = {}
    for point in points:
        if point.case.op == "gemm" and point.timing is not None:
            dtype = point.case.arguments["dtype"]
            best[dtype] = max(best.get(dtype, 0.0), point.flops_per_s)
    plain = best.get("fp32") or max(best.values(), default=1e10)
    return {
        dtype: best.get(dtype, best.get("bf16", plain) if dtype == "fp16" else plain)
        for dtype in COUNTED_DTYPES
    }


def _of_gpu(device: Device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device.torch_device)
    is_amd = getattr(torch.version, "hip", None) is not None
    return {
        "vendor": "amd" if is_amd else "nvidia",
        "compute_capability": (
            getattr(properties, "gcnArchName", "")
            if is_amd
            else f"{properties.major}.{properties.minor}"
        ),
        "num_sms": properties.multi_processor_count,
        "hz": float(getattr(properties, "clock_rate", 0) or 0) * 1e3 or TYPICAL_HZ,
        "l2_bytes": int(getattr(properties, "L2_cache_size", 0)) or TYPICAL_L2_BYTES,
    }


def _cpu_cache() -> int:
    try:
        with open(CACHE_SIZE, encoding="ascii") as file:
            text = file.read().strip()
        return int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)
    except (OSError, ValueError):
        return TYPICAL_L2_BYTES


def _cpu_hz() -> float:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            speeds = [float(line.partition(":")[2]) for line in file if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        speeds = []
    return max(speeds, default=2000.0) * 1e6
