"""What the GPU itself can do: bytes/s of a large copy, FLOP/s of large products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from kernel_rows.environment import measure_ceilings
from kernel_rows.timing import Clock

PRODUCT_SIDE = 8192
WARMUP_CALLS, CALLS = 2, 10
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def ceilings(device: torch.device, budget_s: float) -> dict[str, float]:
    """``measure_ceilings`` of the kernels' benchmark, and square products by type."""
    tiny = device.type != "cuda"
    clock = Clock(device, budget_s)
    found = dict(measure_ceilings(clock, tiny))
    side = 64 if tiny else PRODUCT_SIDE
    for dtype in TYPES:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        found[f"matmul_{str(dtype).removeprefix('torch.')}_flops_per_s"] = (
            2 * side**3 / _seconds(lambda a=a, b=b: a @ b, device)
        )
    return found


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call."""
    samples: list[float] = []
    for _ in range(WARMUP_CALLS + CALLS):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begun)
    return statistics.median(samples[WARMUP_CALLS:])
