"""What watching a training costs: the same steps with ``watch()`` and without, in turn."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from napkinmath_profiler.measuring.device_memory import CpuMemory, DeviceMemory
from napkinmath_profiler.measuring.real_model import optimizer_of, real_inputs, real_model
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.watch import watch
from torch import nn

ROUNDS = 5
STEPS_A_ROUND = 6


def watch_overhead(config: dict[str, Any], options: TraceOptions, device: torch.device) -> dict[str, float]:
    """Seconds a step with and without watching (medians over rounds run in turn), and the seconds spent inside the watch.

    On a CPU the allocator's stand-in would itself cost more than the watch, so there only what the watch spends is of use.
    """
    parsed = config_from(config)
    with real_model(parsed, options, str(device)) as model:
        return _timed(model, parsed, options, device)


def _timed(model: nn.Module, parsed: Any, options: TraceOptions, device: torch.device) -> dict[str, float]:
    optimizer = optimizer_of(model, options)
    inputs = real_inputs(model, parsed, options, str(device))
    assert optimizer is not None

    def steps() -> float:
        started = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            model(**inputs)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / STEPS_A_ROUND

    plain: list[float] = []
    watched: list[float] = []
    inside: list[float] = []
    steps()
    for _ in range(ROUNDS):
        plain.append(steps())
        memory: DeviceMemory | None = None if device.type == "cuda" else CpuMemory()
        with watch(model, optimizer, device=str(device), memory=memory) as watching:
            watched.append(steps())
        inside.append(watching.seconds_spent / STEPS_A_ROUND)
    base = statistics.median(plain)
    return {
        "plain_step_s": base,
        "watched_step_s": statistics.median(watched),
        "inside_watch_s": statistics.median(inside),
        "share_of_step": statistics.median(watched) / base - 1,
        "share_inside_watch": statistics.median(inside) / base,
    }
