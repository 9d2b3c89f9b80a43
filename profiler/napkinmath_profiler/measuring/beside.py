"""What to hold a measurement against: the same step priced analytically, and traced without
storage."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.base.errors import NapkinError
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline
from napkinmath.memory.replay import replay

from napkinmath_profiler.measuring.cpu_choices import cpu_choices
from napkinmath_profiler.trace import TraceOptions, build, trace_options, traced_model
from napkinmath_profiler.tracing.library_workspaces import with_product_workspaces
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of


@dataclass(frozen=True, slots=True)
class Side:
    """One column: a timeline (None where only figures are known), the allocator's figures, seconds
    by phase where priced."""

    name: str
    timeline: Timeline | None
    requested: int
    allocated: int
    reserved: int
    device: int | None
    phase_peaks: dict[Phase, int]
    seconds: dict[Phase, float]


def analytic_side(
    mapping: Mapping[str, Any],
    config: TrainConfig,
    *,
    hardware: Any = None,
    calibration: Any = None,
) -> tuple[Side | None, str]:
    """The estimate's column, or why there is none."""
    try:
        found: Estimate = estimate(mapping, config, hardware=hardware, calibration=calibration)
        return side_of_estimate(found), ""
    except NapkinError as reason:
        return None, f"no analytic estimate: {reason}"


def side_of_estimate(found: Estimate) -> Side:
    """An estimate's column."""
    books, time = found.replay, found.time
    return Side(
        "analytic",
        found.timeline,
        found.peak.nbytes,
        books.peak_allocated,
        books.peak_reserved,
        round(found.memory.device.value) if found.hardware is not None else None,
        {phase: point.nbytes for phase, point in found.timeline.phase_peaks().items()},
        {p.phase: p.seconds for p in time.phases} if time is not None else {},
    )


def traced_side(
    config: Any, options: TraceOptions, device: torch.device, *, workspace_bytes: int = 0
) -> Side:
    """The trace's column: with CUDA's choices and cuBLAS's workspaces of so many bytes beside a
    GPU, with a CPU's beside a CPU."""
    config = copy.deepcopy(config)
    if device.type == "cuda":
        options = with_capability(options, device)
        result = with_product_workspaces(
            trace_options(config, options, all_layers=False), workspace_bytes
        )
    else:
        result = traced_without_choices(config, options)
    return side_of_timeline("traced", timeline_of(result))


def with_capability(options: TraceOptions, device: torch.device) -> TraceOptions:
    """``options`` for the GPU that is there."""
    return dataclasses.replace(options, compute_capability=torch.cuda.get_device_capability(device))


def traced_without_choices(config: Any, options: TraceOptions) -> TraceResult:
    """The step on meta tensors as the libraries run it there, with a CPU's choices and none of
    CUDA's."""
    options = dataclasses.replace(
        options, loop=dataclasses.replace(options.loop, device_type="cpu")
    )
    with cpu_choices():
        return traced_model(build(config, options), config, options, settings=None)


def side_of_timeline(name: str, timeline: Timeline) -> Side:
    """A column of a timeline, its allocator figures replayed."""
    books = replay(timeline)
    peaks = {phase: point.nbytes for phase, point in timeline.phase_peaks().items()}
    return Side(
        name,
        timeline,
        timeline.peak().nbytes,
        books.peak_allocated,
        books.peak_reserved,
        None,
        peaks,
        {},
    )
