"""What a picture of a timeline says, whatever draws it: title, axes, bands, phases, capacity line,
the peak and what it is made of."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.base.units import GIB, KIB, MIB, format_bytes
from napkinmath.ir.ledger import Role
from napkinmath.report import drawn, moments, words
from napkinmath.report.components import components_at
from napkinmath.report.drawn import Columns, Shown
from napkinmath.report.origins import NO_FACTS, facts_of
from napkinmath.report.screen import wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import Timeline

LARGEST_PARTS = 5
# a line above this multiple of the peak is named, not drawn: it would flatten everything else
FAR = 3.0


class Line(Record):
    """A horizontal line, such as the memory of the GPU."""

    label: str
    nbytes: int


_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))


class Picture(Record):
    """Everything a drawing needs, with bytes still in bytes."""

    title: str
    subtitle: str
    columns: Columns
    legend: tuple[tuple[Role, int], ...]
    """Each role drawn and its bytes at the peak, top of the stack first."""
    lines: tuple[Line, ...]
    beyond: tuple[Line, ...]
    """Lines too far above the peak to draw."""
    peak_moment: str
    """Phase, block and operation of the peak."""
    peak_parts: tuple[str, ...]
    peak_nbytes: int
    top: float
    """Bytes at the upper end of the vertical axis."""
    unit: int
    unit_name: str


def picture(
    timeline: Timeline, estimate: Estimate | None, *, title: str, num_columns: int
) -> Picture:
    """The picture of a timeline, with the estimate's names and figures where there is one."""
    found = drawn.shown(timeline)
    columns, peak = drawn.columns(found, num_columns), found.peak
    facts = facts_of(estimate) if estimate is not None else NO_FACTS
    rows = sorted(components_at(found.timeline, peak, facts), key=lambda row: -row.nbytes)
    by_role: dict[Role, int] = {}
    for row in rows:
        by_role[row.role] = by_role.get(row.role, 0) + row.nbytes
    lines = [line for line in device_lines(estimate) if line.nbytes <= FAR * peak.nbytes]
    unit, name = next((size, text) for size, text in _UNITS if peak.nbytes >= size or size == 1)
    operation = moments.operation(found.timeline, peak)
    return Picture(
        title=title or default_title(timeline, estimate),
        subtitle=subtitle(timeline, estimate, found),
        columns=columns,
        legend=tuple((role, by_role.get(role, 0)) for role in reversed(columns.roles)),
        lines=tuple(lines),
        beyond=tuple(line for line in device_lines(estimate) if line.nbytes > FAR * peak.nbytes),
        peak_moment=moments.moment(found.timeline, peak) + (f", {operation}" if operation else ""),
        peak_parts=tuple(f"{format_bytes(row.nbytes)} {row.label}" for row in rows[:LARGEST_PARTS]),
        peak_nbytes=peak.nbytes,
        top=1.06 * max([peak.nbytes * 1.14, *(line.nbytes for line in lines)]) or 1.0,
        unit=unit,
        unit_name=name,
    )


def default_title(timeline: Timeline, estimate: Estimate | None) -> str:
    """The model's name, or where the timeline comes from."""
    return (
        words.model_name(estimate)
        if estimate is not None
        else f"{timeline.stamp.origin} memory timeline"
    )


def subtitle(timeline: Timeline, estimate: Estimate | None, found: Shown) -> str:
    """What is priced, or the stamp's details, and what was left out of the drawing."""
    if estimate is not None:
        phrases = words.headline(estimate)
    else:
        phrases = [words.printable(f"{name} {value}") for name, value in timeline.stamp.details]
    if found.left_out:
        phrases.append(f"{found.left_out} equal micro-steps left out")
    return ", ".join(phrases)


def device_lines(estimate: Estimate | None) -> list[Line]:
    """The device's peak, and the memory of its GPU where one is named."""
    if estimate is None:
        return []
    lines = [
        Line(
            label="peak on the device, with allocator slack and context",
            nbytes=int(estimate.memory.device.value),
        )
    ]
    if estimate.hardware is not None:
        lines.append(
            Line(
                label=words.printable(estimate.hardware.gpu.name),
                nbytes=estimate.hardware.memory_bytes,
            )
        )
    return lines


def amount(nbytes: int, unit: int) -> str:
    """A legend's number: two decimals, 0 for nothing, <0.01 for little."""
    return "0" if not nbytes else f"{nbytes / unit:,.2f}" if nbytes >= 0.005 * unit else "<0.01"


def beside(p: Picture, characters: int) -> list[tuple[str, bool]]:
    """The lines of text under the legend, and whether each is a heading: the peak, what it is made
    of, lines above the plot."""
    rows = [
        (f"peak {format_bytes(p.peak_nbytes)}", True),
        *((row, False) for row in wrap(p.peak_moment, characters)),
    ]
    rows += [("largest parts", True), *((part, False) for part in p.peak_parts)]
    if p.beyond:
        rows += [
            ("above this plot", True),
            *(
                (row, False)
                for line in p.beyond
                for row in wrap(f"{line.label}: {format_bytes(line.nbytes)}", characters)
            ),
        ]
    return rows


# ---------------------------------------------------------------- axes


def ticks(top: float, *, most: int = 7) -> list[float]:
    """Round numbers from 0 to `top`: steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0]
    step = 10.0 ** _exponent(top / most)
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * most >= top)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def _exponent(value: float) -> int:
    exponent = 0
    while value >= 10:
        value, exponent = value / 10, exponent + 1
    while value < 1:
        value, exponent = value * 10, exponent - 1
    return exponent


def number(value: float) -> str:
    """A tick's number without needless zeros: 0, 2.5, 1,000."""
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return text or "0"


def time_unit(extent: float) -> tuple[float, str]:
    """The unit that suits an axis of so many seconds."""
    return next(
        ((size, name) for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if extent >= size),
        (1e-6, "us"),
    )
