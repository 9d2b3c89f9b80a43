"""What watching a training costs: the same steps with ``watch()`` and without, in turn."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from napkinmath_profiler.measuring.device_memory import CpuMemory
from napkinmath_profiler.measuring.real_model import optimizer_of, real_inputs, real_model
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.watch import watch
from torch import nn

ROUNDS = 5
STEPS_A_ROUND = 6


class _Open:
    """Books that are open already: ``watch`` opens and closes those it is given, and these go
    on."""

    def __init__(self, books: CpuMemory) -> None:
        self._books = books

    def __getattr__(self, name: str) -> Any:
        return getattr(self._books, name)

    def __enter__(self) -> _Open:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def watch_overhead(
    config: dict[str, Any],
    options: TraceOptions,
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    steps: int = STEPS_A_ROUND,
) -> dict[str, float]:
    """Seconds a step with and without watching (medians over rounds run in turn), and the seconds
    spent inside the watch.

    On a CPU both run under the same books of a GPU's allocator, so that what differs is the watch
    alone.
    """
    parsed = config_from(config)
    with real_model(parsed, options, str(device)) as model:
        return _timed(model, parsed, options, device, rounds, steps)


def _timed(
    model: nn.Module,
    parsed: Any,
    options: TraceOptions,
    device: torch.device,
    rounds: int,
    count: int,
) -> dict[str, float]:
    optimizer = optimizer_of(model, options)
    inputs = real_inputs(model, parsed, options, str(device))
    assert optimizer is not None

    def steps() -> float:
        started = time.perf_counter()
        for _ in range(count):
            model(**inputs)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / count

    books = None if device.type == "cuda" else CpuMemory()
    plain: list[float] = []
    watched: list[float] = []
    inside: list[float] = []
    with books or nullcontext():
        steps()
        for _ in range(rounds):
            plain.append(steps())
            memory: Any = None if books is None else _Open(books)
            with watch(model, optimizer, device=str(device), memory=memory) as watching:
                watched.append(steps())
            inside.append(watching.seconds_spent / count)
    base = statistics.median(plain)
    return {
        "plain_step_s": base,
        "watched_step_s": statistics.median(watched),
        "inside_watch_s": statistics.median(inside),
        "share_of_step": statistics.median(w / p for w, p in zip(watched, plain, strict=True)) - 1,
        "share_inside_watch": statistics.median(
            i / w for i, w in zip(inside, watched, strict=True)
        ),
    }
