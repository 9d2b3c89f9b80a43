"""The timeline as SVG, written directly: stacked bands by role, phases, the peak and what it is
made of; light and dark."""

from __future__ import annotations

from napkinmath.base.units import format_bytes
from napkinmath.report import moments, words
from napkinmath.report.palette import COLORS
from napkinmath.report.picture import Picture, amount, beside, number, picture, ticks, time_unit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import Timeline

WIDTH, HEIGHT = 1200, 620
LEFT, RIGHT, TOP, BOTTOM = 74, 280, 92, 62
CHARACTER = 6.7  # width of an average character of the 12-pixel font, for what must fit
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;fill:#1d2733}
.paper{fill:#ffffff}.title{font-size:18px;font-weight:600}.faint{fill:#5c6873}.bold{font-weight:600}
.grid{stroke:#dfe4e8}.axis{stroke:#8a949d}.phase{stroke:#8a949d;stroke-dasharray:2 3}.hover{fill:none;pointer-events:all}
.line{stroke:#1d2733;stroke-width:1.2;stroke-dasharray:7 4}.dot{fill:#1d2733}
.halo{paint-order:stroke;stroke:#ffffff;stroke-width:3px}.under{stroke:#ffffff;stroke-width:3;stroke-opacity:.75}
@media (prefers-color-scheme:dark){text,.dot{fill:#e4e9ed}.paper{fill:#14191f}.faint{fill:#a3aeb8}
.grid{stroke:#2b333b}.axis,.phase{stroke:#75818c}.line{stroke:#e4e9ed}.halo,.under{stroke:#14191f}}
"""


def timeline_svg(timeline: Timeline, estimate: Estimate | None = None, *, title: str = "") -> str:
    """The drawing of a timeline; `title` replaces the model's name."""
    return svg(picture(timeline, estimate, title=title, num_columns=WIDTH - LEFT - RIGHT))


def svg(p: Picture) -> str:
    """A picture as an SVG document."""
    frame = Frame(p)
    body = [
        _head(p),
        *_grid(p, frame),
        *_bands(p, frame),
        *_phases(p, frame),
        *_lines(p, frame),
        _peak(p, frame),
        *_panel(p),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" aria-labelledby="title desc"><title'
        f' id="title">{escape(p.title)}</title><desc'
        f' id="desc">{escape("; ".join(row for row, _ in beside(p, WIDTH)))}</desc><style>{STYLE}</style><rect'
        f' class="paper" width="{WIDTH}" height="{HEIGHT}"/>' + "\n".join(body) + "</svg>\n"
    )


class Frame:
    """Where the axes lie, in pixels."""

    def __init__(self, p: Picture) -> None:
        self.left, self.right, self.top, self.bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
        self._extent, self._high = p.columns.extent, p.top

    def x(self, value: float) -> float:
        """Pixels of a time."""
        return self.left + value / self._extent * (self.right - self.left)

    def y(self, nbytes: float) -> float:
        """Pixels of a height."""
        return self.bottom - nbytes / self._high * (self.bottom - self.top)


def escape(text: str) -> str:
    """Text as XML character data."""
    return (
        words.printable(text)
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace('"', "&quot;")
    )


def text(x: float, y: float, content: str, *, kind: str = "", anchor: str = "start") -> str:
    """A text element."""
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{anchor}>{escape(content)}</text>'


def shortened(content: str, pixels: float) -> str:
    """Text cut to about so many pixels."""
    most = int(pixels / CHARACTER)
    return content if len(content) <= most else content[: max(most - 1, 0)] + "…"


def _head(p: Picture) -> str:
    return text(LEFT, 32, shortened(p.title, (WIDTH - LEFT) * 0.66), kind="title") + text(
        LEFT, 53, shortened(p.subtitle, WIDTH - LEFT - 20), kind="faint"
    )


def _grid(p: Picture, frame: Frame) -> list[str]:
    parts: list[str] = []
    for tick in ticks(p.top / p.unit):
        y = frame.y(tick * p.unit)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            + text(frame.left - 8, y + 4, number(tick), kind="faint", anchor="end")
        )
    parts.append(text(frame.left - 8, frame.top - 8, p.unit_name, kind="faint", anchor="end"))
    columns = p.columns
    size, name = time_unit(columns.extent) if columns.in_seconds else (1.0, "events")
    for tick in ticks(columns.extent / size, most=9):
        x = frame.x(tick * size)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}"'
            f' y2="{frame.bottom + 5}"/>'
            + text(x, frame.bottom + 19, number(tick), kind="faint", anchor="middle")
        )
    what = (
        f"time within the step, {name}"
        if columns.in_seconds
        else "events in order (no times known)"
    )
    parts.append(
        text((frame.left + frame.right) / 2, frame.bottom + 42, what, kind="faint", anchor="middle")
    )
    return parts


def _bands(p: Picture, frame: Frame) -> list[str]:
    columns = p.columns
    width = (frame.right - frame.left) / columns.number
    lower = [0] * columns.number
    parts: list[str] = []
    for role, heights in zip(columns.roles, columns.heights, strict=True):
        upper = [low + height for low, height in zip(lower, heights, strict=True)]
        outline = "".join(_outline(upper, frame, width)) + "".join(
            _outline(lower, frame, width, backwards=True)
        )
        parts.append(
            f'<path fill="{COLORS[role]}" stroke="{COLORS[role]}" stroke-width=".4"'
            f' d="M{outline[1:]}Z"><title>{escape(role.value)}</title></path>'
        )
        lower = upper
    parts.append(
        f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}"'
        f' y2="{frame.bottom}"/>'
    )
    return parts


def _outline(
    values: list[int], frame: Frame, width: float, *, backwards: bool = False
) -> list[str]:
    """Steps along the columns, equal neighbours joined."""
    runs: list[tuple[float, float, int]] = []
    start = 0
    for column in range(1, len(values) + 1):
        if column == len(values) or values[column] != values[start]:
            runs.append((frame.left + start * width, frame.left + column * width, values[start]))
            start = column
    if backwards:
        return [
            f"L{x1:.1f} {frame.y(v):.1f}L{x0:.1f} {frame.y(v):.1f}" for x0, x1, v in reversed(runs)
        ]
    return [f"L{x0:.1f} {frame.y(v):.1f}L{x1:.1f} {frame.y(v):.1f}" for x0, x1, v in runs]


def _phases(p: Picture, frame: Frame) -> list[str]:
    """A dashed line where each phase starts, its name above where there is room, else in a hover
    text."""
    parts: list[str] = []
    for span in p.columns.spans:
        x0, x1 = frame.x(span.start), frame.x(span.end)
        label = moments.phase_word(span.phase)
        if span.start > 0:
            parts.append(
                f'<line class="phase" x1="{x0:.1f}" x2="{x0:.1f}" y1="{frame.top - 14}"'
                f' y2="{frame.bottom}"/>'
            )
        if x1 - x0 > len(label) * CHARACTER + 6:
            parts.append(text(x0 + 4, frame.top - 6, label, kind="faint"))
        hover = f"<title>{escape(span.phase.value)}, peak {format_bytes(span.nbytes)}</title>"
        parts.append(
            f'<rect class="hover" x="{x0:.1f}" y="{frame.top - 18}" width="{max(x1 - x0, 1):.1f}"'
            f' height="18">{hover}</rect>'
        )
    return parts


def _lines(p: Picture, frame: Frame) -> list[str]:
    parts: list[str] = []
    for line in p.lines:
        y = frame.y(line.nbytes)
        ends = f'x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"'
        label = text(
            frame.right - 6,
            y - 5,
            f"{line.label}: {format_bytes(line.nbytes)}",
            kind="halo",
            anchor="end",
        )
        parts.append(f'<line class="under" {ends}/><line class="line" {ends}/>{label}')
    return parts


def _panel(p: Picture) -> list[str]:
    """The legend, and under it the peak and what it is made of."""
    x, y, end = WIDTH - RIGHT + 28, TOP + 6, WIDTH - 22
    parts = [text(x, y, f"at the peak, {p.unit_name}", kind="faint")]
    for role, nbytes in p.legend:
        y += 22
        swatch = f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="2" fill="{COLORS[role]}"/>'
        parts.append(
            swatch
            + text(x + 21, y, role.value)
            + text(end, y, amount(nbytes, p.unit), anchor="end")
        )
    y += 22
    parts.append(
        text(x + 21, y, "all tensors", kind="bold")
        + text(end, y, amount(p.peak_nbytes, p.unit), kind="bold", anchor="end")
    )
    y += 14
    for row, heading in beside(p, int((end - x) / CHARACTER)):
        y += 22 if heading else 17
        parts.append(text(x, y, row, kind="bold" if heading else ""))
    return parts


def _peak(p: Picture, frame: Frame) -> str:
    """A dot at the peak and its size, below the dot where a line runs just above it."""
    x, y = frame.x(p.columns.peak_x), frame.y(p.peak_nbytes)
    label = f"peak {format_bytes(p.peak_nbytes)}"
    late = x + 10 + len(label) * CHARACTER > frame.right
    crowded = any(0 <= y - frame.y(line.nbytes) < 20 for line in p.lines)
    name = text(
        x - 9 if late else x + 9,
        y + 15 if crowded else y - 4,
        label,
        kind="bold halo",
        anchor="end" if late else "start",
    )
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>{name}'
