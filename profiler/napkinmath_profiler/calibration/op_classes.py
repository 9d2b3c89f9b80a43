"""What kinds of operation a step's phases spend their time in, as torch's profiler sees it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from napkinmath.ir.ledger import Phase
from torch.profiler import ProfilerActivity, profile

from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.measuring.measured_loop import MeasuredLoop
from napkinmath_profiler.measuring.real_model import optimizer_of, real_inputs, real_model
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.storage_events import TracePhase
from napkinmath_profiler.tracing.traced_timeline import PHASES

PRODUCTS, ATTENTION, DECODING, COPIES, ELEMENTWISE = (
    "matrix products",
    "attention",
    "4-bit decoding",
    "copies and casts",
    "elementwise and reductions",
)
# Parts of the names of aten's and the libraries' operations, in the order they are tried.
NAMES = (
    (
        ATTENTION,
        (
            "scaled_dot_product",
            "flash_attention",
            "efficient_attention",
            "_fused_sdp",
            "cudnn_attention",
        ),
    ),
    (DECODING, ("dequantize", "bitsandbytes")),
    (PRODUCTS, ("addmm", "::mm", "bmm", "baddbmm", "_scaled_mm", "gemm", "mkldnn_linear")),
    (COPIES, ("copy_", "::cat", "::clone", "fill_", "zero_", "Memcpy", "Memset")),
)
MARK = "phase: "
OpClasses = dict[Phase, dict[str, float]]


def class_of(name: str) -> str:
    """The kind of an operation by its name."""
    return next((kind for kind, parts in NAMES if any(part in name for part in parts)), ELEMENTWISE)


def profiled(config: Any, options: TraceOptions, device: Device) -> OpClasses:
    """Seconds by phase and kind of operation of one steady step: on a GPU of its kernels, on a CPU
    of the operations themselves.

    The profiler slows the host down, so these are shares to be read, not speeds.
    """
    where = device.torch_device
    how = dataclasses.replace(options.loop, device_type=where.type)
    options = dataclasses.replace(options, loop=how)
    with real_model(config, options, str(where)) as model:
        inputs = real_inputs(model, config, options, str(where))
        loop = MeasuredLoop(model, optimizer_of(model, options), inputs, how, device=where)
        loop.timed_steps(2)
        marks = _Marks()
        loop.listeners.append(marks.begin)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
        with _without_kineto_lines(), profile(activities=activities, acc_events=True) as found:
            loop.timed_steps(1)
            device.synchronize()
            marks.end()
    return _by_phase(found.events(), on_gpu=device.is_cuda)


@contextmanager
def _without_kineto_lines() -> Generator[None]:
    """Kineto writes a line for its every start and stop to the process's standard error, whatever
    its log level."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class _Marks:
    """Ranges in the profile, one a phase."""

    def __init__(self) -> None:
        self._open: Any = None

    def begin(self, phase: TracePhase) -> None:
        """A phase begins, and the one before ends."""
        self.end()
        self._open = torch.profiler.record_function(f"{MARK}{PHASES[phase].value}")
        self._open.__enter__()

    def end(self) -> None:
        """The last phase ends."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _by_phase(events: Any, *, on_gpu: bool) -> OpClasses:
    ranges = sorted(
        (e.time_range.start, e.time_range.end, e.name.removeprefix(MARK))
        for e in events
        if e.name.startswith(MARK) and e.device_type.name == "CPU"
    )
    found: OpClasses = {}
    for event in events:
        if event.name.startswith(MARK) or event.device_type.name != "CPU":
            continue
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        phase = next(
            (name for start, end, name in ranges if start <= event.time_range.start < end), None
        )
        if seconds > 0 and phase is not None:
            of_phase = found.setdefault(Phase(phase), {})
            kind = class_of(event.name)
            of_phase[kind] = of_phase.get(kind, 0.0) + seconds
    return found


def joined(found: Mapping[Phase, Mapping[str, float]]) -> OpClasses:
    """The loss counted as part of the forward, as in the seconds of the phases."""
    result = {phase: dict(kinds) for phase, kinds in found.items() if phase is not Phase.LOSS}
    for kind, seconds in found.get(Phase.LOSS, {}).items():
        forward = result.setdefault(Phase.FORWARD, {})
        forward[kind] = forward.get(kind, 0.0) + seconds
    return result
