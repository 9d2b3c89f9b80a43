"""The screen: fits or not, by how much, what sets the peak, what it is made of, how fast, what to
change; in that order."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import returned_bytes
from napkinmath.base.units import GIB, MIB, format_bytes, format_hours, format_seconds
from napkinmath.ir.ledger import Role
from napkinmath.report import curve, moments, words
from napkinmath.report.advice import INDENT, print_changes, print_remedy
from napkinmath.report.components import RETURNED, components_of
from napkinmath.report.largest import largest_sizes
from napkinmath.report.palette import BAD, COLORS, GOOD, UNSURE
from napkinmath.report.parts import LABELS
from napkinmath.report.ruler import ruler
from napkinmath.report.screen import (
    Screen,
    bar,
    cut_between_words,
    is_unicode,
    sparkline,
    standard_output,
    terminal_width,
    wants_color,
)
from napkinmath.report.words import in_gib, margin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Range
    from napkinmath.answers.throughput import Throughput
    from napkinmath.answers.whole_run import WholeRun
    from napkinmath.report.advice import Over
    from napkinmath.report.components import Component
    from napkinmath.timing.schedule import StepTime

LEAST_SHARE = (
    0.001  # of the device figure, below which a part of the activations has no line of its own
)
FOLDED = "activations.other"  # the row of parts without a line of their own
ORIGIN, LEAST_ORIGIN = "where it comes from", 28  # a column, and the columns that it needs
_VERDICTS = {
    Verdict.FITS: ("FITS", GOOD),
    Verdict.DOES_NOT_FIT: ("DOES NOT FIT", BAD),
    Verdict.UNKNOWN: ("CANNOT TELL", UNSURE),
    Verdict.NOT_ASKED: ("", ""),
}


def print_report(
    estimate: Estimate,
    *,
    width: int | None = None,
    color: bool | None = None,
    stream: TextIO | None = None,
    over: Over | None = None,
) -> None:
    """Prints the report; width and colours follow the stream unless given."""
    out = stream or standard_output()
    out.write(
        report_text(
            estimate,
            width=width or terminal_width(out),
            color=wants_color(out) if color is None else color,
            unicode=is_unicode(out),
            over=over,
        )
    )


def report_text(
    estimate: Estimate,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    over: Over | None = None,
) -> str:
    """The report as text; `over` gives the reader's command with other flags, and what of it they
    replace."""
    screen = Screen(width, color=color, unicode=unicode)
    _head(screen, estimate)
    _verdict(screen, estimate)
    _peak(screen, estimate)
    _components(screen, components_of(estimate))
    _step(screen, estimate)
    _speed(screen, estimate)
    print_remedy(screen, estimate, over)
    print_changes(screen, estimate.changes, over)
    _fits(screen, estimate)
    for finding in estimate.findings:
        screen.flow("  note", [words.printable(finding.text)], indent=INDENT, style=UNSURE)
    screen.flow(
        "  assumed",
        [words.printable(text) for text in estimate.assumptions],
        indent=INDENT,
        separator="; ",
    )
    return screen.text()


# ---------------------------------------------------------------- what, and does it fit


def _head(screen: Screen, e: Estimate) -> None:
    name = words.model_name(e)
    where = words.machine(e.hardware) if e.hardware is not None else ""
    gap = screen.width - len(name) - len(where)
    if gap < 2:
        screen.line((name, "bold"))
        gap, name = screen.width - len(where), ""
    screen.line((name, "bold"), " " * max(gap, 0), (where, "bold"))
    screen.flow("", words.headline(e), indent=2, separator=", ")
    if mesh := words.mesh(e):
        screen.flow(
            "", [*mesh, "figures are of the rank that needs most"], indent=2, separator=", "
        )


def _verdict(screen: Screen, e: Estimate) -> None:
    text, style = _VERDICTS[e.verdict]
    if e.hardware is not None:
        how, more = margin(e)
        screen.line("  ", (text, f"bold {style}"), f"   {how}")
        if more:
            screen.flow("", [more], indent=INDENT, style="dim")
    screen.flow("  memory", _memory(e), indent=INDENT)
    if host := words.host_memory(e):
        screen.flow("  host RAM", host, indent=INDENT)
    if measured := _measured_memory(e):
        screen.flow("  measured", measured, indent=INDENT)


def _memory(e: Estimate) -> list[str]:
    """The allocator's and the device's figures, and what lies elsewhere."""
    memory = e.memory
    pages = e.time is not None and e.time.paging_s
    managed = "unified memory, in and out in every step:" if pages else "unified memory"
    elsewhere = (("host memory", e.host_bytes), (managed, e.managed_bytes))
    return [
        _figure("allocated", memory.allocated),
        _figure("reserved", memory.reserved),
        _figure("device", memory.device) + " GiB" + (RETURNED if returned_bytes(e) else ""),
        *(f"{what} {format_bytes(size)}" for what, size in elsewhere if size),
    ]


def _figure(name: str, value: Range) -> str:
    return f"{name} {in_gib(value.value)} ({in_gib(value.low)}-{in_gib(value.high)})"


def _peak(screen: Screen, e: Estimate) -> None:
    peaks = list(e.phase_peaks.items())
    op = moments.operation(e.timeline, e.peak)
    first = (
        f"{moments.moment(e.timeline, e.peak)}{f', {op}' if op else ''}:"
        f" {format_bytes(e.peak.nbytes)} requested"
    )
    others = [
        f"{moments.phase_word(phase)} {_difference(point.nbytes - e.peak.nbytes)}"
        for phase, point in peaks[1:4]
    ]
    screen.flow(
        "  peak at", [first, *(["then " + ", ".join(others)] if others else [])], indent=INDENT
    )


# ---------------------------------------------------------------- what it is made of


def _components(screen: Screen, components: tuple[Component, ...]) -> None:
    total = sum(row.nbytes for row in components)
    rows = _folded(components, total)
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    labels = max(len(row.label) for row in rows)
    bar_width = max(8, min(20, screen.width - labels - 66))
    room = screen.width - labels - bar_width - 14
    origins = room >= LEAST_ORIGIN
    heading = f"{'':{bar_width}} {ORIGIN}" if origins else ""
    screen.line((f"  {'at the peak'.ljust(labels)} {name:>8}  {heading}", "dim"))
    largest = max(row.nbytes for row in rows) or 1
    for row in rows:
        drawn = bar(max(row.nbytes, 0) / largest, bar_width, unicode=screen.unicode)
        left = f"  {row.label.ljust(labels)} {_amount(row.nbytes, unit):>8}  "
        origin = f" {cut_between_words(words.printable(row.origin), room)}" if origins else ""
        screen.line(left, (drawn.ljust(bar_width), COLORS[row.role]), (origin, "dim"))
    screen.line((f"  {'on the device'.ljust(labels)} {_amount(total, unit):>8}", "bold"))
    if not origins:
        screen.line((f"  left out at {screen.width} columns: {ORIGIN}", "dim"))


def _folded(rows: tuple[Component, ...], total: int) -> list[Component]:
    """The rows with bytes, in the order of the table; parts of the activations too small to see
    become one row."""
    parts = [row for row in rows if row.role is Role.ACTIVATIONS and row.nbytes > 0]
    small = [row for row in parts if row.nbytes < LEAST_SHARE * total]
    shown = [row for row in rows if row.nbytes]
    if len(small) < 2:
        return shown
    small = [row for row in parts if row in small or row.key == FOLDED]  # one row has the label
    number, nbytes = sum(row.num_tensors for row in small), sum(row.nbytes for row in small)
    labels = ", ".join(row.label.partition(": ")[2] for row in small)
    folded = small[0].replace(
        key=FOLDED,
        label=LABELS[FOLDED],
        nbytes=nbytes,
        num_tensors=number,
        origin=f"{number} tensors: {labels}",
    )
    order = list(LABELS)
    whole = [row for row in shown if row not in small]
    return sorted([*whole, folded], key=lambda row: order.index(row.key))


def _amount(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:,.2f}" if abs(nbytes) >= 0.005 * unit else "<0.01"


# ---------------------------------------------------------------- the step, and how fast


def _step(screen: Screen, e: Estimate) -> None:
    columns = screen.width - INDENT - 1
    drawn = curve.envelope(e.timeline, columns)
    screen.line(("  one step".ljust(INDENT), "dim"), (sparkline(drawn.values), COLORS_OF_SPARK))
    seconds = {p.phase: p.seconds for p in e.time.phases} if e.time is not None else {}
    under, short = ruler(drawn, columns, seconds)
    screen.line(" " * INDENT, (under, "dim"))
    span = f"between {format_bytes(min(drawn.values))} and {format_bytes(max(drawn.values))}"
    screen.flow(
        "", [span, *(["too short to draw: " + ", ".join(short)] if short else [])], indent=INDENT
    )


COLORS_OF_SPARK = GOOD
SHORT = (_head, _verdict, _step)  # the report in a few lines, which views.py shows


def _speed(screen: Screen, e: Estimate) -> None:
    time = e.time
    if time is None:
        screen.flow("  speed", [words.no_time(e)], indent=INDENT)
        return
    whole = e.throughput
    several = whole is not None and whole.gpus > 1
    speed = (
        f"{whole.tokens_per_s_per_gpu:,.0f} tokens/s a GPU"
        if whole is not None and several
        else words.rate(e)
    )
    speed += f" ({words.speed_span(e)})"
    rates = [
        f"{format_seconds(time.seconds)}/step",
        speed,
        f"MFU {time.mfu:.0%}",
        f"HFU {time.hfu:.0%}",
        f"bound by {_bounds(time, whole)}",
        words.speed_source(e),
    ]
    screen.flow("  speed", rates, indent=INDENT)
    if e.config.workload.has_engine:
        from napkinmath.report.rollouts import rollout_words

        screen.flow("  rollouts", rollout_words(e), indent=INDENT)
    if whole is not None and (several or e.price_per_gpu_hour is not None):
        screen.flow("  in all", _in_all(whole, e.price_per_gpu_hour), indent=INDENT)
    if (run := e.whole_run) is not None:
        screen.flow("  the run", _whole_run(run, e.price_per_gpu_hour), indent=INDENT)


def _bounds(time: StepTime, whole: Throughput | None) -> str:
    """What the step's seconds are spent on, by share."""
    bounds = ("compute", "bandwidth", "launch", "host link", "host memory", "NVMe")
    bounds += ("communication", "rollouts")
    shares = [f"{bound} {time.share(bound):.0%}" for bound in bounds if time.share(bound) >= 0.005]
    if whole is not None and whole.bubble_share >= 0.005:
        shares.append(f"pipeline bubble {whole.bubble_share:.0%}")
    return ", ".join(shares)


# ---------------------------------------------------------------- where it fits


def _fits(screen: Screen, e: Estimate) -> None:
    if e.fits_on:
        _fits_on(screen, e)
    if sizes := largest_sizes(e):
        screen.flow("  largest", sizes, indent=INDENT)


def _fits_on(screen: Screen, e: Estimate) -> None:
    own = e.hardware.gpu.name if e.hardware is not None else ""
    good = [fit for fit in e.fits_on if fit.verdict is Verdict.FITS and fit.gpu != own]
    unsure = [fit for fit in e.fits_on if fit.verdict is Verdict.UNKNOWN and fit.gpu != own]
    lacking = words.without_bf16(e)
    others = len(e.fits_on) - any(fit.gpu == own for fit in e.fits_on)
    if good or not unsure:
        label = "  also fits" if e.verdict is Verdict.FITS else "  fits"
        none = f"none of the {'other ' if own else ''}{others} GPUs in the catalog"
        screen.flow(label, words.by_size(good, lacking) or [none], indent=INDENT)
    if unsure and len(unsure) < others:  # where a key leaves every GPU open, no list says anything
        screen.flow("  perhaps", words.by_size(unsure, lacking), indent=INDENT)


# ---------------------------------------------------------------- numbers


def _difference(nbytes: int) -> str:
    return f"{nbytes / GIB:+.2f} GiB" if abs(nbytes) >= 0.01 * GIB else f"{nbytes / MIB:+.1f} MiB"


def _whole_run(run: WholeRun, price_per_gpu_hour: float | None) -> list[str]:
    """The training from its first step to its last."""
    parts = [
        f"{run.steps:,} steps",
        f"{run.tokens / 1e6:,.{1 if run.tokens < 1e9 else 0}f} M tokens with padding",
        f"{format_hours(run.seconds)} ({format_hours(run.fastest_s)}-{format_hours(run.slowest_s)})",
    ]
    if run.gpus > 1:
        parts.append(f"{run.gpu_hours:,.1f} GPU-hours")
    if price_per_gpu_hour is not None:
        parts.append(f"{run.gpu_hours * price_per_gpu_hour:,.2f} in money")
    return parts


def _in_all(whole: Throughput, price_per_gpu_hour: float | None) -> list[str]:
    """All GPUs together: tokens a second, and what a billion tokens take."""
    parts = [
        (
            f"{whole.tokens_per_s:,.0f} tokens/s on {whole.gpus:,} GPUs"
            if whole.gpus > 1
            else f"{whole.tokens_per_s:,.0f} tokens/s"
        )
    ]
    parts.append(
        f"a billion tokens: {whole.gpu_hours_per_billion:,.1f} GPU-hours, at most"
        f" {whole.kwh_per_billion:,.0f} kWh"
    )
    if price_per_gpu_hour is not None:
        parts.append(
            f"{whole.price_per_billion(price_per_gpu_hour):,.2f} at {price_per_gpu_hour:g} a"
            " GPU-hour"
        )
    return parts


def _measured_memory(estimate: Estimate) -> list[str]:
    """What real layers, carried over to the whole model, say of its peak beside what was priced;
    nothing where they cannot."""
    peaks = estimate.measured_peaks
    if not peaks:
        return []
    highest, priced = max(peaks.values()), estimate.peak.nbytes
    phases = ", ".join(
        f"{phase} {format_bytes(nbytes)}" for phase, nbytes in peaks.items() if nbytes < highest
    )
    winner = next(phase for phase, nbytes in peaks.items() if nbytes == highest)
    return [
        (
            f"{format_bytes(highest)} requested in the {winner}, by real layers"
            f" ({highest / priced - 1:+.1%} of the priced)"
        ),
        phases,
    ]
