"""The plot of `estimate links`: time and bus bandwidth by message size, on logarithmic axes, as SVG
or PNG."""

from __future__ import annotations

import io
import os
from math import ceil, floor, log10

from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import format_bytes, format_seconds
from napkinmath.base.whole_file import write_whole
from napkinmath.report.links import LinkTable, described

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from napkinmath.report.links import Message

    Point = tuple[float, float]

_COLOURS = ("#3b6fb6", "#d1722f", "#3f9a58", "#a8457a", "#7a6bb0", "#8a8a2a", "#555555")
_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL_WIDTH, _PANEL_HEIGHT = 980, 420, 80, 60, 360, 280


def write_link_plot(table: LinkTable, path: str, *, force: bool = False) -> None:
    """Writes the plot; InputError for an unknown suffix, an existing file without `force`, or one
    that cannot be written."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".svg", ".png"):
        raise InputError(
            f"plot file {shown(path, limit=200)} has no known suffix; use .svg or .png"
        )
    drawing = link_svg(table) if suffix == ".svg" else _link_png(table, path)
    write_whole(path, drawing, force=force, what="plot file")


def link_svg(table: LinkTable) -> str:
    """The plot as an SVG document: seconds on the left, bus bandwidth on the right."""
    kinds = list(dict.fromkeys(m.kind for m in table.messages))
    seconds = [
        [(float(m.nbytes), m.seconds) for m in table.messages if m.kind == kind] for kind in kinds
    ]
    rates = [
        [(float(m.nbytes), m.bus_bytes_per_s / 1e9) for m in table.messages if m.kind == kind]
        for kind in kinds
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">'
    ]
    lines.append(f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>')
    lines.append(f'<text x="{_LEFT}" y="22" font-size="14">{described(table)[0]}</text>')
    lines += _panel(_LEFT, seconds, "time", format_seconds)
    lines += _panel(
        _LEFT + _PANEL_WIDTH + 110, rates, "bus bandwidth", lambda value: f"{value:g} GB/s"
    )
    for index, kind in enumerate(kinds):
        x = _LEFT + 120 * index
        lines.append(
            f'<rect x="{x}" y="{_HEIGHT - 24}" width="12" height="12"'
            f' fill="{_COLOURS[index % len(_COLOURS)]}"/>'
        )
        lines.append(f'<text x="{x + 17}" y="{_HEIGHT - 14}">{kind}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _panel(
    left: int, series: Sequence[Sequence[Point]], title: str, label: Callable[[float], str]
) -> list[str]:
    xs = [log10(x) for points in series for x, _ in points]
    ys = [log10(max(y, 1e-12)) for points in series for _, y in points]
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1e-9)
    low_y, high_y = floor(min(ys)), max(ceil(max(ys)), floor(min(ys)) + 1)
    bottom = _TOP + _PANEL_HEIGHT

    def place(x: float, y: float) -> str:
        across = (log10(x) - low_x) / (high_x - low_x) * _PANEL_WIDTH
        up = (log10(max(y, 1e-12)) - low_y) / (high_y - low_y) * _PANEL_HEIGHT
        return f"{left + across:.1f},{bottom - up:.1f}"

    def number(power: int) -> list[str]:
        y = bottom - (power - low_y) / (high_y - low_y) * _PANEL_HEIGHT
        return [
            f'<path d="M{left} {y:.1f}h{_PANEL_WIDTH}" stroke="#dddddd"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label(10.0**power)}</text>',
        ]

    def size(nbytes: float) -> str:
        x = place(nbytes, 10.0**low_y).partition(",")[0]
        return f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{format_bytes(nbytes)}</text>'

    lines = [f'<text x="{left}" y="{_TOP - 10}">{title}</text>']
    lines += [line for power in range(low_y, high_y + 1) for line in number(power)]
    sizes = sorted({x for points in series for x, _ in points})
    lines += [size(nbytes) for nbytes in sizes[:: max(1, len(sizes) // 4)]]
    for index, points in enumerate(series):
        path = " ".join(place(x, y) for x, y in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{_COLOURS[index % len(_COLOURS)]}"'
            ' stroke-width="1.8"/>'
        )
    return lines


def _link_png(table: LinkTable, path: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            f"plot file {shown(path, limit=200)} needs matplotlib; install it, or name an .svg file"
        ) from None
    figure: Any = Figure(figsize=(9.8, 4.2))
    FigureCanvasAgg(figure)
    _png_panel(figure.add_subplot(1, 2, 1), table, "time, s", lambda m: m.seconds)
    _png_panel(
        figure.add_subplot(1, 2, 2),
        table,
        "bus bandwidth, GB/s",
        lambda m: m.bus_bytes_per_s / 1e9,
    )
    figure.axes[0].legend()
    figure.suptitle(described(table)[0])
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _png_panel(axis: Any, table: LinkTable, title: str, value: Callable[[Message], float]) -> None:
    """A line for each collective, by message size."""
    for index, kind in enumerate(dict.fromkeys(m.kind for m in table.messages)):
        own = [m for m in table.messages if m.kind == kind]
        color = _COLOURS[index % len(_COLOURS)]
        axis.loglog([m.nbytes for m in own], [value(m) for m in own], color=color, label=kind)
    axis.set_title(title)
    axis.set_xlabel("message, bytes")
    axis.grid(alpha=0.3)
