"""The measured step on a screen and as JSON, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from napkinmath.base.units import GIB, MIB, format_bytes
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline
from napkinmath.report import curve
from napkinmath.report.palette import BAD, GOOD, UNSURE
from napkinmath.report.screen import Screen, sparkline

from napkinmath_profiler.measuring import comparison
from napkinmath_profiler.measuring.beside import Side
from napkinmath_profiler.measuring.measurement import Measurement, OutOfMemoryReport
from napkinmath_profiler.measuring.partial import ExtrapolatedModel

SCHEMA_VERSION = 1
INDENT = 13
COLUMN = 14
STAMPED = ("torch", "transformers", "peft", "bitsandbytes", "driver", "cuda")
# The estimate prices the loss as part of the forward.
STEP_PHASES = {
    "forward and loss": (Phase.FORWARD, Phase.LOSS),
    "backward": (Phase.BACKWARD,),
    "gradient clipping": (Phase.CLIP,),
    "optimizer step": (Phase.STEP,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureReport:
    """Everything the report shows; ``measured`` is the column of the whole model, written out from
    ``measurement`` where that is part of it."""

    title: str
    what: list[str]
    measurement: Measurement
    measured: Side | None
    whole: ExtrapolatedModel | None
    predicted: list[Side]
    notes: list[str] = field(default_factory=list[str])
    explain: bool = False
    """Whether the screen shows the table by module too."""

    @property
    def sides(self) -> list[Side]:
        """The columns, what is predicted first."""
        return [*self.predicted, *([self.measured] if self.measured is not None else [])]

    @property
    def exit_code(self) -> int:
        """1 where memory ran out, else 0."""
        return 1 if self.measurement.failure is not None else 0

    @property
    def tokens_per_s(self) -> float | None:
        """Of the whole model."""
        if self.whole is None:
            return self.measurement.tokens_per_s
        seconds = sum(self.whole.seconds.values())
        return self.measurement.tokens / seconds if seconds > 0 else None


def report_text(report: MeasureReport, *, width: int, color: bool, unicode: bool) -> str:
    """The report as text."""
    screen = Screen(width, color=color, unicode=unicode)
    screen.line((report.title, "bold"), f"   {report.measurement.device}")
    screen.flow("", report.what, indent=2, separator=", ")
    _extent(screen, report)
    _failure(screen, report)
    if report.measured is not None:
        screen.line()
        _memory(screen, report)
        _phases(screen, report)
        _seconds(screen, report)
        _curve(screen, report.measured.timeline, width - INDENT - 1)
        _tables(screen, report)
    for note in (*report.measurement.notes, *report.notes):
        screen.flow("  note", [note], indent=INDENT, style=UNSURE)
    stamps = [f"{k} {v}" for k, v in report.measurement.environment.items() if k in STAMPED]
    screen.flow("  ran", stamps, indent=INDENT, separator=", ")
    return screen.text()


def _curve(screen: Screen, timeline: Timeline | None, columns: int) -> None:
    if timeline is not None:
        values = curve.envelope(timeline, columns).values
        screen.line(("  one step".ljust(INDENT), "dim"), (sparkline(values), GOOD))


def _extent(screen: Screen, report: MeasureReport) -> None:
    if report.whole is None:
        return
    m = report.measurement
    rest = (
        "the rest written out from like ones"
        if report.whole.result is not None
        else "peaks drawn out along a line, phase by phase"
    )
    screen.line((f"  {m.num_layers} of {m.total_layers} layers measured, {rest}", UNSURE))


def _failure(screen: Screen, report: MeasureReport) -> None:
    failure = report.measurement.failure
    if failure is None:
        return
    where = f"while {failure.stage}" + (
        f", step {failure.step}, {failure.phase}" if failure.phase else ""
    )
    screen.line("  ", ("OUT OF MEMORY", f"bold {BAD}"), f"   {where}")
    screen.flow("", [failure.message], indent=2)
    held = [f"{role} {format_bytes(size)}" for role, size in failure.held_by_role.items()]
    figures = [
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in failure.figures.items()
    ]
    if held:
        screen.flow("  held", held, indent=INDENT, separator=", ")
    if figures:
        screen.flow("  device", figures, indent=INDENT, separator=", ")


def _header(screen: Screen, title: str, sides: list[Side]) -> None:
    names = "".join(f"{side.name:>{COLUMN}}" for side in sides)
    screen.line(
        (
            (
                f"  {title:24}{names}{'measured - predicted':>24}"
                if len(sides) > 1
                else f"  {title:24}{names}"
            ),
            "dim",
        )
    )


def _row(
    screen: Screen, name: str, values: Sequence[float | None], unit: float, digits: int
) -> None:
    if all(value is None for value in values):
        return
    cells = "".join(
        f"{'-':>{COLUMN}}" if v is None else f"{v / unit:>{COLUMN}.{digits}f}" for v in values
    )
    first, last = values[0], values[-1]
    difference = (
        f"{(last - first) / unit:+.{digits}f} ({(last - first) / first:+.1%})"
        if len(values) > 1 and first and last is not None
        else ""
    )
    screen.line(f"  {name:24}{cells}{difference:>24}")


def _unit(report: MeasureReport) -> tuple[int, str]:
    return (GIB, "GiB") if max(side.requested for side in report.sides) >= GIB else (MIB, "MiB")


def _memory(screen: Screen, report: MeasureReport) -> None:
    unit, name = _unit(report)
    _header(screen, f"peak, {name}", report.sides)
    for row in ("requested", "allocated", "reserved", "device"):
        _row(screen, row, [getattr(side, row) or None for side in report.sides], unit, 3)


def _phases(screen: Screen, report: MeasureReport) -> None:
    unit, name = _unit(report)
    _header(screen, f"requested by phase, {name}", report.sides)
    for name, phases in STEP_PHASES.items():
        peaks = [
            max((side.phase_peaks.get(phase, 0) for phase in phases), default=0) or None
            for side in report.sides
        ]
        _row(screen, name, peaks, unit, 3)


def _seconds(screen: Screen, report: MeasureReport) -> None:
    sides = [side for side in report.sides if side.seconds]
    if not sides or report.measured is None or not report.measured.seconds:
        return
    _header(screen, "milliseconds", sides)
    for name, phases in STEP_PHASES.items():
        values = [sum(side.seconds.get(p, 0.0) for p in phases) or None for side in sides]
        _row(screen, name, values, 1e-3, 2)
    _row(screen, "step", [sum(side.seconds.values()) for side in sides], 1e-3, 2)
    step = report.measurement.step
    if step is not None:
        part = "" if report.whole is None else f" with {report.measurement.num_layers} layers"
        screen.line(
            f"  {'':24}measured {step.num_samples} steps{part}: {step.low_s * 1e3:.2f} to"
            f" {step.high_s * 1e3:.2f} ms"
        )
    if report.tokens_per_s is not None:
        screen.line(("  speed".ljust(26), "dim"), f"{report.tokens_per_s:,.0f} tokens/s")


def _tables(screen: Screen, report: MeasureReport) -> None:
    timelines = timelines_of(report)
    if timelines:
        screen.line()
        text = comparison.table(comparison.compare(timelines))
        for line in (text if report.explain else text.partition("\n\n")[0]).splitlines():
            screen.line(f"  {line}")


def timelines_of(report: MeasureReport) -> dict[str, Timeline]:
    """The columns that have a timeline."""
    return {side.name: side.timeline for side in report.sides if side.timeline is not None}


def as_mapping(report: MeasureReport) -> dict[str, Any]:
    """The report as a JSON document."""
    m, failure = report.measurement, report.measurement.failure
    timelines = timelines_of(report)
    return {
        "schema": SCHEMA_VERSION,
        "title": report.title,
        "config": report.what,
        "exit_code": report.exit_code,
        "device": m.device,
        "layers": {"measured": m.num_layers, "total": m.total_layers},
        "sides": {side.name: _side_mapping(side) for side in report.sides},
        "phases": {phase.value: _phase_mapping(report, phase) for phase in m.phases},
        "step_seconds": None if m.step is None else _spread(m.step),
        "tokens_per_s": report.tokens_per_s,
        "comparison": comparison.as_mapping(comparison.compare(timelines)) if timelines else None,
        "out_of_memory": None if failure is None else _failure_mapping(failure),
        "notes": [*m.notes, *report.notes],
        "environment": m.environment,
    }


def _failure_mapping(failure: OutOfMemoryReport) -> dict[str, Any]:
    return {
        "message": failure.message,
        "stage": failure.stage,
        "phase": failure.phase,
        "step": failure.step,
        "figures": failure.figures,
        "held_by_role": failure.held_by_role,
    }


def _side_mapping(side: Side) -> dict[str, Any]:
    return {
        "requested": side.requested,
        "allocated": side.allocated,
        "reserved": side.reserved,
        "device": side.device,
        "phase_peaks": {phase.value: size for phase, size in side.phase_peaks.items()},
        "seconds": {phase.value: value for phase, value in side.seconds.items()},
    }


def _phase_mapping(report: MeasureReport, phase: Phase) -> dict[str, Any]:
    summary = report.measurement.phases[phase]
    return {
        "seconds": _spread(summary.seconds),
        "peak_allocated": summary.peak_allocated,
        "peak_reserved": summary.peak_reserved,
    }


def _spread(spread: Any) -> dict[str, float]:
    return {
        "median": spread.median_s,
        "low": spread.low_s,
        "high": spread.high_s,
        "samples": spread.num_samples,
    }
