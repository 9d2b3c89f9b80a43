"""Tables of one estimate, for forms that are read elsewhere than on a terminal: nothing depends on
a width, and nothing is cut."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.base.units import GIB, format_bytes, format_seconds
from napkinmath.report import moments, words
from napkinmath.report.components import components_of
from napkinmath.report.formats import Sheet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Range


def estimate_sheets(e: Estimate) -> list[Sheet]:
    """What it is and whether it fits, what the peak is made of, the step's phases, what to change,
    other GPUs, and what is to be said besides; sheets without a row are left out."""
    sheets = (_summary(e), _components(e), _phases(e), _changes(e), _fits(e), _notes(e))
    return [sheet for sheet in sheets if sheet.rows]


def _summary(e: Estimate) -> Sheet:
    rows = [("training", ", ".join([*words.headline(e), *words.mesh(e)]))]
    if e.hardware is not None:
        rows += [("GPU", words.machine(e.hardware)), ("verdict", e.verdict.value)]
        rows.append(("headroom", words.margin(e)[0]))
    memory = e.memory
    figures = (memory.allocated, memory.reserved, memory.device)
    rows += [(f"{name}, GiB", _range(f)) for name, f in zip(_FIGURES, figures, strict=True)]
    rows.append(("peak", moments.moment(e.timeline, e.peak)))
    if e.time is not None:
        rows += [("step", format_seconds(e.time.seconds)), ("speed", words.rate(e))]
        rows += [("MFU", f"{e.time.mfu:.0%}"), ("speeds are", words.speed_source(e))]
    return Sheet(heads=("figure", "value"), rows=tuple(rows), title=words.model_name(e))


_FIGURES = ("allocated", "reserved", "device")


def _range(value: Range) -> str:
    return f"{words.in_gib(value.value)} ({words.in_gib(value.low)}-{words.in_gib(value.high)})"


def _components(e: Estimate) -> Sheet:
    rows = components_of(e)
    return Sheet(
        title="At the peak",
        heads=("component", "GiB", "where it comes from"),
        rows=tuple((r.label, f"{r.nbytes / GIB:.2f}", r.origin) for r in rows),
        right=("GiB",),
    )


def _phases(e: Estimate) -> Sheet:
    phases = e.time.phases if e.time is not None else ()
    return Sheet(
        title="One step",
        heads=("phase", "time", "bound by"),
        rows=tuple(
            (moments.phase_word(p.phase), format_seconds(p.seconds), p.bound) for p in phases
        ),
        right=("time",),
    )


def _changes(e: Estimate) -> Sheet:
    rows = (
        (c.flag, c.meaning, format_bytes(c.saved_bytes), _speed(c.speed_ratio)) for c in e.changes
    )
    return Sheet(
        title="What to change",
        heads=("flag", "change", "saves", "speed"),
        rows=tuple(rows),
        right=("saves", "speed"),
    )


def _speed(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.0f}%"


def _fits(e: Estimate) -> Sheet:
    own, lacking = e.hardware.gpu.name if e.hardware is not None else "", words.without_bf16(e)
    good = [f for f in e.fits_on if f.verdict is Verdict.FITS and f.gpu != own]
    return Sheet(
        title="Also fits" if e.verdict is Verdict.FITS else "Fits",
        heads=("GPU", "GiB", "to spare, GiB"),
        rows=tuple(
            (
                f"{f.gpu} (no bf16)" if f.gpu in lacking else f.gpu,
                f"{f.capacity_bytes / GIB:.1f}",
                "" if f.headroom_bytes is None else f"{f.headroom_bytes / GIB:.1f}",
            )
            for f in good
        ),
        right=("GiB", "to spare, GiB"),
    )


def _notes(e: Estimate) -> Sheet:
    said = [("note", finding.text) for finding in e.findings]
    assumed = [("assumed", text) for text in e.assumptions]
    return Sheet(title="Notes", heads=("kind", "text"), rows=(*said, *assumed))
