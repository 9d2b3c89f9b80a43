"""The traced step on a screen and as JSON: what is asked first comes first, every figure read off
the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from napkinmath.base.units import GIB, MIB, format_bytes
from napkinmath.config.hardware import Hardware
from napkinmath.ir.timeline import Timeline
from napkinmath.memory.replay import Replay
from napkinmath.report import curve
from napkinmath.report.palette import BAD, COLORS, GOOD, UNSURE
from napkinmath.report.screen import Screen, bar, sparkline

from napkinmath_profiler.tracing.cuda_choices import CHOICES
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_findings import TraceFinding
from napkinmath_profiler.tracing.trace_result import PeakMoment, TraceResult, starred
from napkinmath_profiler.tracing.traced_timeline import ROLES

SCHEMA_VERSION = 1
INDENT = 13
MOST_KEPT = 8
PHASE_WORDS = {
    TracePhase.SETUP: "loading",
    TracePhase.RECOMPUTE: "recompute",
    TracePhase.CLIP: "gradient clipping",
    TracePhase.OPTIMIZER: "optimizer step",
    TracePhase.ZERO_GRAD: "between steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Everything the report shows."""

    title: str
    what: list[str]
    result: TraceResult
    timeline: Timeline
    books: Replay
    findings: list[TraceFinding]
    hardware: Hardware | None
    num_layers_traced: str

    @property
    def device_bytes(self) -> int | None:
        """What ``nvidia-smi`` would show, where a GPU is named."""
        return (
            None
            if self.hardware is None
            else self.books.peak_reserved + self.hardware.context_bytes
        )

    @property
    def exit_code(self) -> int:
        """0 fits or nothing to fit on; 1 does not fit; 3 fits only if the allocator returns its
        cache."""
        if self.hardware is None:
            return 0
        if self.books.peak_reserved <= self.hardware.usable_bytes:
            return 0
        return 3 if self.books.peak_allocated <= self.hardware.usable_bytes else 1


def phase_word(phase: TracePhase) -> str:
    """A phase in plain words."""
    return PHASE_WORDS.get(phase, phase.value)


def moment(peak: PeakMoment) -> str:
    """'backward of model.layers.3.mlp, aten.mm.default'."""
    place = f" of {peak.module}" if peak.module else ""
    return f"{phase_word(peak.phase)}{place}" + (
        f", {peak.op.removeprefix('aten.').removesuffix('.default')}" if peak.op else ""
    )


def report_text(report: TraceReport, *, width: int, color: bool, unicode: bool) -> str:
    """The report as text."""
    screen = Screen(width, color=color, unicode=unicode)
    screen.line((report.title, "bold"))
    screen.flow("", report.what, indent=2, separator=", ")
    _verdict(screen, report)
    _memory(screen, report)
    _peaks(screen, report.result)
    _roles(screen, report.result)
    _kept(screen, report.result)
    columns = width - INDENT - 1
    screen.line(
        ("  one step".ljust(INDENT), "dim"),
        (sparkline(curve.envelope(report.timeline, columns).values), GOOD),
    )
    for finding in report.findings:
        screen.flow("  note", [finding.text], indent=INDENT, style=UNSURE)
    _choices(screen, report.result)
    versions = [f"{name} {version}" for name, version in report.result.versions.items()]
    screen.flow(
        "  ran",
        [f"{len(report.result.events):,} events, {report.num_layers_traced}", *versions],
        indent=INDENT,
        separator=", ",
    )
    return screen.text()


def _verdict(screen: Screen, report: TraceReport) -> None:
    if report.hardware is None:
        return
    word, style = {0: ("FITS", GOOD), 1: ("DOES NOT FIT", BAD), 3: ("CANNOT TELL", UNSURE)}[
        report.exit_code
    ]
    spare = report.hardware.usable_bytes - report.books.peak_reserved
    text = (
        f"{format_bytes(spare)} to spare"
        if spare >= 0
        else f"{format_bytes(-spare)} more reserved than usable"
    )
    screen.line("  ", (word, f"bold {style}"), f"   {text} on {report.hardware.gpu.name}")


def _memory(screen: Screen, report: TraceReport) -> None:
    books = report.books
    figures = [
        ("requested", report.result.peak_bytes),
        ("allocated", books.peak_allocated),
        ("reserved", books.peak_reserved),
    ]
    shown = [f"{name} {value / GIB:.2f}" for name, value in figures]
    if report.device_bytes is not None:
        shown.append(f"device {report.device_bytes / GIB:.2f}")
    screen.flow("  memory", [*shown[:-1], shown[-1] + " GiB"], indent=INDENT)


def _peaks(screen: Screen, result: TraceResult) -> None:
    peak = result.peak
    others = sorted(result.peak_by_phase().items(), key=lambda item: -item[1].requested_bytes)
    rest = [
        f"{phase_word(p)} -{format_bytes(peak.requested_bytes - m.requested_bytes)}"
        for p, m in others
        if p is not peak.phase
    ]
    screen.flow(
        "  peak at",
        [f"{moment(peak)}: {format_bytes(peak.requested_bytes)}", "then " + ", ".join(rest[:3])],
        indent=INDENT,
    )


def _roles(screen: Screen, result: TraceResult) -> None:
    peak = result.peak
    rows = sorted(result.bytes_by_role(peak.event_index).items(), key=lambda item: -item[1])
    largest = rows[0][1] or 1
    unit, name = (GIB, "GiB") if peak.requested_bytes >= GIB else (MIB, "MiB")
    screen.line((f"  {'at the peak':24} {name:>8}", "dim"))
    origins = _largest_by_role(result)
    for role, size in rows:
        drawn = bar(size / largest, 16, unicode=screen.unicode).ljust(16)
        screen.line(
            f"  {role.value:24} {_amount(size, unit):>8}  ",
            (drawn, COLORS[ROLES[role]]),
            (f" {origins.get(role, '')}", "dim"),
        )


def _amount(size: int, unit: int) -> str:
    return f"{size / unit:,.2f}" if size >= 0.005 * unit else "<0.01"


def _largest_by_role(result: TraceResult) -> dict[StorageRole, str]:
    found: dict[StorageRole, str] = {}
    for (role, where, op, shape, dtype, _), count, _size in result.grouped_at(
        result.peak.event_index
    ):
        what = f"{count} x {list(shape)} {dtype} of {where or op}"
        found.setdefault(StorageRole(role), what)
    return found


def _kept(screen: Screen, result: TraceResult) -> None:
    """What the forward keeps for the backward, by module and op."""
    groups: dict[tuple[str, str], list[int]] = {}
    for record in result.saved_records():
        group = groups.setdefault((starred(record.module), record.op), [0, 0])
        group[0] += 1
        group[1] += record.rounded_bytes
    rows = sorted(groups.items(), key=lambda item: -item[1][1])[:MOST_KEPT]
    if not rows:
        return
    screen.line(
        (f"  {'kept for the backward':24} {'MiB':>8}  of {format_bytes(result.saved_bytes)}", "dim")
    )
    for (module, op), (count, size) in rows:
        screen.line(
            f"  {'':24} {size / MIB:>8,.1f}  {count} x {module or '(root)'}"
            f" {op.removeprefix('aten.').removesuffix('.default')}"
        )


def _choices(screen: Screen, result: TraceResult) -> None:
    kernels = ", ".join(f"{name} x{count}" for name, count in sorted(result.attention.items()))
    items = [
        f"{CHOICES[n].what} (x{c})" if n in CHOICES else f"{n} x{c}"
        for n, c in sorted(result.choices.items())
        if n != "sdpa"
    ]
    if kernels:
        items.insert(0, f"attention kernel: {kernels}")
    screen.flow("  as on CUDA", items, indent=INDENT, separator="; ")


def as_mapping(report: TraceReport) -> dict[str, Any]:
    """The report as a JSON document."""
    result, peak = report.result, report.result.peak
    return {
        "schema": SCHEMA_VERSION,
        "title": report.title,
        "config": report.what,
        "exit_code": report.exit_code,
        "memory": {
            "requested": result.peak_bytes,
            "allocated": report.books.peak_allocated,
            "reserved": report.books.peak_reserved,
            "device": report.device_bytes,
        },
        "peak": _moment_mapping(peak),
        "phase_peaks": [
            _moment_mapping(m)
            for m in sorted(result.peak_by_phase().values(), key=lambda m: -m.requested_bytes)
        ],
        "roles_at_peak": {
            role.value: size for role, size in result.bytes_by_role(peak.event_index).items()
        },
        "persistent": {role.value: size for role, size in result.persistent_bytes().items()},
        "saved_for_backward": result.saved_bytes,
        "cuda_choices": result.choices,
        "attention_kernels": result.attention,
        "findings": [{"text": f.text, "nbytes": f.num_bytes} for f in report.findings],
        "num_events": len(result.events),
        "layers": report.num_layers_traced,
        "versions": result.versions,
    }


def _moment_mapping(m: PeakMoment) -> dict[str, Any]:
    return {
        "requested": m.requested_bytes,
        "phase": m.phase.value,
        "module": m.module,
        "op": m.op,
        "step": m.step,
        "micro_step": m.micro_step,
    }
