"""``estimate bench``: the ceilings of this device, and where a model's operations lie under
them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import format_seconds
from napkinmath.base.whole_file import refuse_existing
from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from napkinmath.config.hardware import Hardware
from napkinmath.estimate import Estimate, estimate
from napkinmath.timing.efficiency import Efficiency, default_efficiency
from rich.console import Console
from rich.table import Table

from napkinmath_profiler.calibration.device_facts import gpu_of
from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.op_curves import fitted
from napkinmath_profiler.calibration.op_plan import planned
from napkinmath_profiler.calibration.op_points import OpPoint, measure_ops
from napkinmath_profiler.calibration.progress import progress
from napkinmath_profiler.calibration.report import (
    ops_table,
    print_notes,
    rates_table,
    table,
    unmeasured_lines,
)
from napkinmath_profiler.calibration.roofline import ModelOp, model_ops_of, write_roofline
from napkinmath_profiler.calibration.stamp import stamp_of
from napkinmath_profiler.calibration.steady import refuse_doubtful
from napkinmath_profiler.cli.calibrate import (
    DEFAULT_SHARE,
    allowance_of,
    chosen_device,
    named_model,
    quieten_libraries,
)

DEFAULT_BUDGET_S = 60.0
MOST_OPS = 12
OWN = (
    (("--device",), TEXT, "NAME", "cuda, cuda:N or cpu [cuda]"),
    (("--budget",), TEXT, "S", f"seconds it may take [{DEFAULT_BUDGET_S:g}]"),
    (("--share",), TEXT, "SHARE", f"how much of the free memory may be taken [{DEFAULT_SHARE:g}]"),
    (("--plot",), TEXT, "FILE", "roofline as .png or .svg"),
    (("--force",), ON, "", "replace a file that exists"),
)
DESCRIPTION = (
    "Time this device's copies, matrix products, attention, launches and links over rotated inputs;"
    " with --model also those of its step, and show them under the roofline."
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What was measured of a device, and a model's step as priced at these speeds."""

    device: Device
    facts: Mapping[str, Any]
    points: Sequence[OpPoint]
    speed: Efficiency
    step: Estimate | None
    ops: Sequence[ModelOp]
    notes: Sequence[str]


def run(argv: Sequence[str]) -> int:
    """Parses the flags, measures, prints the tables, draws."""
    given = cast(
        Mapping[str, Any],
        Parser("estimate bench", DESCRIPTION, (*SHARED, ("bench", OWN))).parse(argv),
    )
    quieten_libraries()
    if "gpu" in given:
        raise InputError(
            f"--gpu {shown(given['gpu'][0])} names what an estimate is for; a benchmark runs on"
            " what is here: --device cuda:N"
        )
    plot = given.get("plot")
    if plot is not None and not plot.lower().endswith((".png", ".svg")):
        raise InputError(f"--plot {shown(plot)} has no known ending; use .png or .svg")
    if plot is not None:
        refuse_existing(plot, "force" in given)
    found = measured(given)
    if "json" in given:
        print(json.dumps(as_mapping(found), indent=1))
    else:
        _print(found)
    refuse_doubtful(found.points, found.speed, found.speed.gpu, found.device, what=_not_drawn(plot))
    if plot is not None:  # last: a disk that is full costs the picture alone
        title = (
            f"{found.device.name}{f': {found.step.spec.name}' if found.step is not None else ''}"
        )
        write_roofline(plot, found.points, title=title, ops=found.ops, force="force" in given)
        print(f"roofline written to {plot}", file=sys.stderr if "json" in given else sys.stdout)
    return 0


def _not_drawn(plot: str | None) -> str:
    return "these figures are doubtful" if plot is None else "the roofline is not drawn"


def measured(given: Mapping[str, Any]) -> Benchmark:
    """Measures what the flags ask for, within their seconds and memory."""
    notes: list[str] = []
    device = chosen_device(given)
    allowed = allowance_of({"budget": str(DEFAULT_BUDGET_S), **given}, device, notes)
    model = named_model(given, device, notes) if {"model", "arch"} & given.keys() else None
    priced = estimate(model.spec, model.train) if model is not None else None
    with progress(allowed) as advance:
        points = measure_ops(planned(device, priced), device, allowed, notes, advance)
    gpu, facts = gpu_of(device, points)
    speed = fitted(default_efficiency(gpu), points)
    hardware = Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes)
    step = None
    if model is not None:
        step = estimate(model.spec, model.train, hardware=hardware, efficiency=speed)
    ops = model_ops_of(step) if step is not None else []
    return Benchmark(device, facts, points, speed, step, ops, notes)


def as_mapping(found: Benchmark) -> dict[str, Any]:
    """The benchmark as JSON."""
    return {
        "device": found.device.name,
        "stamp": dict(stamp_of(found.device)),
        "facts": dict(found.facts),
        "notes": list(found.notes),
        "ops": [point.as_row() for point in found.points],
        "model_ops": [op.as_row() for op in found.ops],
    }


def _print(found: Benchmark) -> None:
    console = Console()
    console.print(f"[bold]{found.device.name}[/bold]", highlight=False)
    console.print(ops_table(found.points, found.speed))
    for line in unmeasured_lines(found.points):
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    console.print(rates_table(found.speed))
    if found.step is not None and found.step.time is not None:
        priced = f"{found.step.spec.name}, priced at these speeds"
        console.print(
            _model_table(
                f"a step of {priced}: {format_seconds(found.step.time.seconds)}", found.ops
            )
        )
    print_notes(found.notes, console)


def _model_table(title: str, ops: Sequence[ModelOp]) -> Table:
    """A model's operations by their share of the step."""
    total = sum(op.seconds for op in ops)
    columns = ("operation", "phase", "FLOP/byte", "TFLOP/s", "GB/s", "share")
    made = table(title, *columns, numbers=4)
    for op in ops[:MOST_OPS]:
        made.add_row(
            op.name,
            op.phase,
            f"{op.intensity:.3g}" if op.flops else "0",
            f"{op.flops / op.seconds / 1e12:.3g}" if op.flops else "",
            f"{op.moved / op.seconds / 1e9:.4g}",
            f"{op.seconds / total:.1%}",
        )
    return made
