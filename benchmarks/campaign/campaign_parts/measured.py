"""A case measured: the row that is kept of it."""

from __future__ import annotations

import errno
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from kernel_rows.goals import LOST
from kernel_rows.lost_context import is_lost
from napkinmath.inputs.options import train_config
from napkinmath_profiler.measuring.history_pass import LIBRARY_WORKSPACE
from napkinmath_profiler.measuring.measurement import Measurement
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.tracing.trace_options import options_from

from campaign_parts.cases import Case, tiny_config
from campaign_parts.ledger import Row, append_row

NUM_STEPS, NUM_WARMUP_STEPS = 4, 2
MEMORY_SHARE = 0.97


def measure_case(case: Case, device: torch.device, *, tiny: bool, events: Path | None) -> Row:
    """Measure ``case``; a failure is a row that says so."""
    started = time.monotonic()
    row: Row = {
        "case": case.name,
        "model": case.model,
        "layers": case.layers,
        "options": case.flags,
        "trial": device.type != "cuda",
    }
    if case.flags["method"] == "qlora" and find_spec("bitsandbytes") is None:
        return row | {"status": "skipped", "reason": "bitsandbytes is not installed"}
    if case.flags.get("kernels") == "napkinmath" and find_spec("triton") is None:
        return row | {"status": "skipped", "reason": "triton is not installed"}
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    config = tiny_config(case) if tiny else case.config
    try:
        options = options_from(train_config(case.flags), compute_capability=capability)
        how = MeasureOptions(
            device=str(device),
            num_steps=NUM_STEPS,
            num_warmup_steps=NUM_WARMUP_STEPS,
            memory_share=MEMORY_SHARE,
        )
        found = measure_step(config, options, how)
        row |= {
            "config": config,
            "compute_capability": list(capability),
            "status": "measured",
            **figures(found),
        }
        if found.failure is not None:
            row["status"] = "out of memory"
        elif case.history and events is not None:
            save_events(case.name, found, events)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # no row could be kept either
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
    # of libraries, drivers and compilers, each with types of its own: a case that fails is a row
    except Exception as error:
        row |= {
            "status": "failed",
            "reason": f"{type(error).__name__}: {str(error)[:300]}",
            "where": traceback.format_exc()[-600:],
        }
        if is_lost(device):
            row["status"] = LOST
    return row | {"wall_s": round(time.monotonic() - started, 2)}


def figures(found: Measurement) -> Row:
    """The measured figures as JSON."""
    row: Row = {
        "tokens": found.tokens,
        "tokens_per_s": found.tokens_per_s,
        "notes": list(found.notes),
    }
    if found.memory is not None:
        memory = found.memory
        row["memory"] = {
            name: getattr(memory, name)
            for name in (
                "requested",
                "allocated",
                "reserved",
                "device_used",
                "before_allocated",
                "num_retries",
            )
        }
    row["phases"] = {
        phase.value: {
            "median_s": s.seconds.median_s,
            "low_s": s.seconds.low_s,
            "high_s": s.seconds.high_s,
            "peak_allocated": s.peak_allocated,
            "peak_reserved": s.peak_reserved,
        }
        for phase, s in found.phases.items()
    }
    if found.step is not None:
        row["step"] = {
            "median_s": found.step.median_s,
            "low_s": found.step.low_s,
            "high_s": found.step.high_s,
            "samples": found.step.num_samples,
        }
    if found.timeline is not None and found.timeline.segments:
        row["requested_by_phase"] = {
            phase.value: point.nbytes for phase, point in found.timeline.phase_peaks().items()
        }
        row["roles_at_peak"] = {
            role.value: size
            for role, size in found.timeline.breakdown(found.timeline.peak()).items()
        }
    if found.result is not None:
        row["library_bytes"] = sum(
            r.rounded_bytes for r in found.result.records if r.name == LIBRARY_WORKSPACE
        )
    if found.failure is not None:
        row["out_of_memory"] = {
            "message": found.failure.message[:300],
            "stage": found.failure.stage,
            "phase": found.failure.phase,
            "figures": found.failure.figures,
        }
    return row


def save_events(name: str, found: Measurement, path: Path) -> None:
    """Append the allocator's life over two steps: each event as (sign, bytes, phase, module, role),
    with names in tables."""
    assert found.result is not None
    phases: dict[str, int] = {}
    modules: dict[str, int] = {}
    roles: dict[str, int] = {}
    events: list[list[int]] = []
    for event in found.result.events:
        record = found.result.records[event.storage_id]
        role = record.role.value if record.role is not None else ""
        events.append(
            [
                event.storage_id if event.is_allocation else -1 - event.storage_id,
                record.requested_bytes,
                phases.setdefault(event.phase.value, len(phases)),
                modules.setdefault(event.module, len(modules)),
                roles.setdefault(role, len(roles)),
                event.step,
            ]
        )
    row: dict[str, Any] = {
        "case": name,
        "phases": list(phases),
        "modules": list(modules),
        "roles": list(roles),
        "events": events,
    }
    if found.snapshot is not None:
        trace = next((t for t in found.snapshot["device_traces"] if t), [])
        row["allocator"] = [
            [e["action"], e.get("addr", 0), e["size"], e.get("stream", 0)] for e in trace
        ]
    append_row(path, row)
