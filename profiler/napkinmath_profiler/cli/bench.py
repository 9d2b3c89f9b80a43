"""``estimate bench``: the ceilings of this device, and where a model's operations lie under
them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import format_seconds
from napkinmath.cli.flags import SHARED, TEXT
from napkinmath.cli.parser import Parser
from napkinmath.config.hardware import Hardware
from napkinmath.estimate import Estimate, estimate
from napkinmath.timing.efficiency import Efficiency, default_efficiency

from napkinmath_profiler.calibration.device_facts import gpu_of
from napkinmath_profiler.calibration.devices import choose_device
from napkinmath_profiler.calibration.op_curves import fitted
from napkinmath_profiler.calibration.op_plan import planned
from napkinmath_profiler.calibration.op_points import OpPoint, measure_ops
from napkinmath_profiler.calibration.progress import progress
from napkinmath_profiler.calibration.roofline import ModelOp, model_ops_of, write_roofline
from napkinmath_profiler.calibration.stamp import stamp_of
from napkinmath_profiler.cli.calibrate import DEFAULT_SHARE, allowance_of, named_model

DEFAULT_BUDGET_S = 60.0
MOST_OPS = 12
OWN = (
    (("--device",), TEXT, "NAME", "cuda, cuda:N or cpu [cuda]"),
    (("--budget",), TEXT, "S", f"seconds it may take [{DEFAULT_BUDGET_S:g}]"),
    (("--share",), TEXT, "SHARE", f"how much of the free memory may be taken [{DEFAULT_SHARE:g}]"),
    (("--plot",), TEXT, "FILE", "roofline as .png or .svg"),
)
DESCRIPTION = (
    "Time this device's copies, matrix products, attention, launches and links over rotated inputs;"
    " with --model also those of its step, and show them under the roofline."
)


def run(argv: Sequence[str]) -> int:
    """Parses the flags, measures, prints the tables, draws."""
    given = Parser("estimate bench", DESCRIPTION, (*SHARED, ("bench", OWN))).parse(argv)
    for library in ("transformers", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if "gpu" in given:
        raise InputError(
            f"--gpu {shown(given['gpu'][0])} names what an estimate is for; a benchmark runs on"
            " what is here: --device cuda:N"
        )
    plot = given.get("plot")
    if plot is not None and not plot.lower().endswith((".png", ".svg")):
        raise InputError(f"--plot {shown(plot)} has no known ending; use .png or .svg")
    notes: list[str] = []
    device = choose_device(values.text(given["device"], "--device") if "device" in given else None)
    allowed = allowance_of({"budget": str(DEFAULT_BUDGET_S), **given}, device, notes)
    model = named_model(given, device, notes) if {"model", "arch"} & given.keys() else None
    priced = estimate(model.spec, model.train) if model is not None else None
    with progress(allowed) as advance:
        points = measure_ops(planned(device, priced), device, allowed, notes, advance)
    gpu, facts = gpu_of(device, points)
    speed = fitted(default_efficiency(gpu), points)
    hardware = Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes)
    step = (
        estimate(model.spec, model.train, hardware=hardware, efficiency=speed)
        if model is not None
        else None
    )
    ops = model_ops_of(step) if step is not None else []
    if "json" in given:
        print(
            json.dumps(
                as_mapping(device.name, stamp_of(device), facts, points, ops, notes), indent=1
            )
        )
    else:
        _print(device.name, points, speed, step, ops, notes)
    if plot is not None:  # last: a disk that is full costs the picture alone
        title = f"{device.name}{f': {step.spec.name}' if step is not None else ''}"
        write_roofline(plot, points, title=title, ops=ops)
        print(f"roofline written to {plot}", file=sys.stderr if "json" in given else sys.stdout)
    return 0


def as_mapping(
    name: str,
    stamp: Mapping[str, str],
    facts: Mapping[str, Any],
    points: Sequence[OpPoint],
    ops: Sequence[ModelOp],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The benchmark as JSON."""
    return {
        "device": name,
        "stamp": dict(stamp),
        "facts": dict(facts),
        "notes": list(notes),
        "ops": [point.as_row() for point in points],
        "model_ops": [
            {
                "name": op.name,
                "kind": op.kind,
                "phase": op.phase,
                "flops": op.flops,
                "moved": op.moved,
                "intensity": op.intensity,
                "seconds": op.seconds,
            }
            for op in ops
        ],
    }


def _print(
    name: str,
    points: Sequence[OpPoint],
    speed: Efficiency,
    step: Estimate | None,
    ops: Sequence[ModelOp],
    notes: Sequence[str],
) -> None:
    from rich.console import Console

    from napkinmath_profiler.calibration.report import (
        ops_table,
        print_notes,
        rates_table,
        table,
        unmeasured_lines,
    )

    console = Console()
    console.print(f"[bold]{name}[/bold]", highlight=False)
    console.print(ops_table(points, speed))
    for line in unmeasured_lines(points):
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    console.print(rates_table(speed))
    if step is not None and step.time is not None:
        total = sum(op.seconds for op in ops)
        made = table(
            f"a step of {step.spec.name}, priced at these speeds:"
            f" {format_seconds(step.time.seconds)}",
            "operation",
            "phase",
            "FLOP/byte",
            "TFLOP/s",
            "GB/s",
            "share",
            numbers=4,
        )
        for op in ops[:MOST_OPS]:
            attained = f"{op.flops / op.seconds / 1e12:.3g}" if op.flops else ""
            made.add_row(
                op.name,
                op.phase,
                f"{op.intensity:.3g}" if op.flops else "0",
                attained,
                f"{op.moved / op.seconds / 1e9:.4g}",
                f"{op.seconds / total:.1%}",
            )
        console.print(made)
    print_notes(notes, console)
