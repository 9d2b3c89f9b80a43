"""The timeline as PNG through matplotlib (the extra `plots`), from the same picture as the SVG."""

from __future__ import annotations

import io
import warnings
from importlib import import_module

from napkinmath.base.errors import InputError
from napkinmath.base.installing import pip_install
from napkinmath.base.units import format_bytes
from napkinmath.report import moments, words
from napkinmath.report.palette import COLORS
from napkinmath.report.picture import Picture, amount, beside, number, picture, ticks, time_unit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import Timeline

COLUMNS, PANEL_CHARACTERS = 1400, 36
INK, FAINT, GRID = "#1d2733", "#5c6873", "#dfe4e8"


def timeline_png(timeline: Timeline, estimate: Estimate | None = None, *, title: str = "") -> bytes:
    """The drawing as PNG bytes; InputError names the extra where matplotlib is missing."""
    canvas, figures = _matplotlib("backends.backend_agg"), _matplotlib("figure")
    p = picture(timeline, estimate, title=title, num_columns=COLUMNS)
    figure = figures.Figure(figsize=(12, 6.4), dpi=150, facecolor="white")
    canvas.FigureCanvasAgg(figure)
    axes = figure.add_axes((0.062, 0.105, 0.705, 0.735))
    _draw(axes, p)
    _words(figure, axes, p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model's name may hold characters that the font lacks
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw(axes: Any, p: Picture) -> None:
    columns = p.columns
    scale, name = time_unit(columns.extent) if columns.in_seconds else (1.0, "events")
    edges = [columns.extent / scale * i / columns.number for i in range(columns.number + 1)]
    lower = [0.0] * columns.number
    for role, heights in zip(columns.roles, columns.heights, strict=True):
        upper = [low + height / p.unit for low, height in zip(lower, heights, strict=True)]
        axes.stairs(upper, edges, baseline=lower, fill=True, color=COLORS[role], linewidth=0)
        lower = upper
    for span in columns.spans[1:]:
        axes.axvline(span.start / scale, color=FAINT, linewidth=0.7, linestyle=(0, (2, 3)))
    for line in p.lines:
        _capacity(axes, line.nbytes / p.unit, f"{line.label}: {format_bytes(line.nbytes)}")
    timed = f"time within the step, {name}"
    along = timed if columns.in_seconds else "events in order (no times known)"
    _frame(axes, columns.extent / scale, p.top / p.unit, along)


def _capacity(axes: Any, height: float, label: str) -> None:
    """A line across the drawing, and its name."""
    axes.axhline(height, color="white", linewidth=2.5, alpha=0.75)
    axes.axhline(height, color=INK, linewidth=1, linestyle=(0, (6, 3)))
    axes.annotate(
        label,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-5, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=INK,
        path_effects=_halo(),
    )


def _frame(axes: Any, extent: float, top: float, along: str) -> None:
    """Limits, ticks and grid; `along` names the horizontal axis."""
    axes.set_xlim(0, extent)
    axes.set_ylim(0, top)
    axes.set_yticks(values := ticks(top), [number(v) for v in values])
    axes.set_xticks(values := ticks(extent, most=9), [number(v) for v in values])
    axes.set_xlabel(along, color=FAINT, fontsize=9)
    axes.tick_params(colors=FAINT, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _words(figure: Any, axes: Any, p: Picture) -> None:
    title, below = words.printable(p.title), words.printable(p.subtitle)[:150]
    figure.text(0.062, 0.945, title, fontsize=13, fontweight="bold", color=INK, parse_math=False)
    figure.text(0.062, 0.905, below, fontsize=8.5, color=FAINT, parse_math=False)
    figure.text(0.055, 0.852, p.unit_name, fontsize=9, color=FAINT, ha="right")
    columns = p.columns
    scale = time_unit(columns.extent)[0] if columns.in_seconds else 1.0
    for span in columns.spans:
        if (span.end - span.start) / columns.extent > 0.0095 * len(moments.phase_word(span.phase)):
            axes.annotate(
                moments.phase_word(span.phase),
                (span.start / scale, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=9,
                color=FAINT,
            )
    _peak(axes, p, columns.peak_x / scale)
    _panel(figure, p)


def _peak(axes: Any, p: Picture, x: float) -> None:
    """A dot at the peak, and its bytes where there is room beside it."""
    y = p.peak_nbytes / p.unit
    late = p.columns.peak_x > 0.88 * p.columns.extent
    crowded = any(0 <= line.nbytes - p.peak_nbytes < 0.045 * p.top for line in p.lines)
    axes.plot([x], [y], "o", color=INK, markersize=5, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(p.peak_nbytes)}",
        (x, y),
        fontsize=9,
        fontweight="bold",
        color=INK,
        path_effects=_halo(),
        xytext=(-8 if late else 8, -13 if crowded else 4),
        textcoords="offset points",
        ha="right" if late else "left",
    )


def _halo() -> list[Any]:
    """White around letters that lie on a band."""
    return [_matplotlib("patheffects").withStroke(linewidth=3, foreground="white")]


def _matplotlib(module: str) -> Any:
    """A module of matplotlib; InputError names the extra where it is missing."""
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError:
        raise InputError(
            f"a PNG needs matplotlib: {pip_install('plots')}; .svg and .html need nothing more"
        ) from None


def _panel(figure: Any, p: Picture) -> None:
    """The legend, and under it the peak and what it is made of."""
    left, right, y = 0.79, 0.985, 0.835
    figure.text(left, y, f"at the peak, {p.unit_name}", fontsize=9, color=FAINT)
    for role, nbytes in p.legend:
        y -= 0.035
        figure.text(left, y, "■", fontsize=11, color=COLORS[role])
        figure.text(left + 0.018, y, role.value, fontsize=9, color=INK)
        figure.text(right, y, amount(nbytes, p.unit), fontsize=9, color=INK, ha="right")
    y -= 0.035
    strong: dict[str, Any] = {"fontsize": 9, "color": INK, "fontweight": "bold"}
    figure.text(left + 0.018, y, "all tensors", **strong)
    figure.text(right, y, amount(p.peak_nbytes, p.unit), ha="right", **strong)
    y -= 0.022
    light: dict[str, Any] = {"fontsize": 8.5, "color": INK, "fontweight": "normal"}
    for row, heading in beside(p, PANEL_CHARACTERS):
        y -= 0.036 if heading else 0.028
        figure.text(left, y, row, parse_math=False, **(strong if heading else light))
