"""What the estimate and the trace say of a measured case."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from napkinmath.base.errors import NapkinError
from napkinmath.calibration.calibration import read_calibration
from napkinmath.config.hardware import Hardware
from napkinmath.estimate import estimate
from napkinmath.inputs.options import train_config
from napkinmath_profiler.measuring.beside import (
    Side,
    side_of_estimate,
    side_of_timeline,
    traced_without_choices,
)
from napkinmath_profiler.trace import trace_options
from napkinmath_profiler.tracing.library_workspaces import with_product_workspaces
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from
from napkinmath_profiler.tracing.traced_timeline import timeline_of

from campaign_parts.ledger import Row


def predict(
    row: Mapping[str, Any],
    hardware: Hardware | None,
    calibration: str | None,
    *,
    traced: bool = True,
) -> Row:
    """The analytic figures (uncalibrated, and calibrated where there is a file), and the traced
    ones, of a measured row."""
    started = time.monotonic()
    found: Row = {"case": row["case"]}
    config = train_config(row["options"])
    try:
        priced = estimate(row["config"], config, hardware=hardware)
        found["analytic"] = side_row(side_of_estimate(priced)) | {
            "step_s": priced.time.seconds if priced.time is not None else None
        }
        if calibration is not None and hardware is not None:
            speeds = read_calibration(calibration, hardware.gpu, allow_stale=True)
            calibrated = estimate(row["config"], config, hardware=hardware, calibration=speeds).time
            found["calibrated"] = {"step_s": calibrated.seconds if calibrated is not None else None}
    except NapkinError as reason:
        found["not_priced"] = str(reason)[:300]
    if traced:
        found |= _traced(row, config, hardware)
    return found | {"wall_s": round(time.monotonic() - started, 2)}


def _traced(row: Mapping[str, Any], config: Any, hardware: Hardware | None) -> Row:
    try:
        major, minor = row.get("compute_capability", (8, 0))
        options = options_from(config, compute_capability=(major, minor))
        parsed = config_from(row["config"])
        if row.get("trial"):
            result = traced_without_choices(parsed, options)
        else:
            workspace = hardware.gpu.cublas_workspace_bytes if hardware is not None else 0
            result = with_product_workspaces(
                trace_options(parsed, options, all_layers=False), workspace
            )
        return {"traced": side_row(side_of_timeline("traced", timeline_of(result)))}
    except (
        NapkinError,
        RuntimeError,
        ValueError,
        TypeError,
        ImportError,
        AttributeError,
        NotImplementedError,
    ) as error:
        return {"not_traced": f"{type(error).__name__}: {str(error)[:300]}"}


def side_row(side: Side) -> Row:
    """A column as JSON."""
    return {
        "requested": side.requested,
        "allocated": side.allocated,
        "reserved": side.reserved,
        "requested_by_phase": {phase.value: size for phase, size in side.phase_peaks.items()},
        "seconds_by_phase": {phase.value: seconds for phase, seconds in side.seconds.items()},
    }
