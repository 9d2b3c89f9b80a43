"""How the notebooks' pictures look: one style, and the shapes that several of them draw.

Nothing here works out a figure: notebooks do that, and hand over what is to be drawn.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from napkinmath.report.palette import COLORS, STACK

GIB = 2**30
# From the bottom of a stack to its top.
ROLE_COLORS: dict[Hashable, str] = {role: COLORS[role] for role in STACK}
# Blue, orange, wine, teal: also distinct for readers with each of three colour deficiencies.
LINE_COLORS = ("#5666ab", "#d98a1f", "#8a1f3d", "#3fa796")
DARK, LIGHT = "#333333", "#e5e5e5"
SEEN = 0.004  # of the longest bar; thinner parts have no place in the legend

STYLE = {
    "figure.dpi": 150,
    "figure.figsize": (7.5, 3.2),
    "figure.constrained_layout.use": True,
    "font.size": 8.5,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=LINE_COLORS),
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "legend.frameon": False,
}


def use_style() -> None:
    """Sets matplotlib's defaults for all pictures that follow: 150 dpi, colours, spines."""
    plt.rcParams.update(STYLE)


def stacked_bars(
    axes: Axes,
    bars: Mapping[str, Mapping[Hashable, float]],
    *,
    lying: bool = False,
    unit: float = GIB,
    digits: int = 1,
    colors: Mapping[Hashable, str] = ROLE_COLORS,
    ends: Sequence[str] = (),
) -> None:
    """Draws one stacked bar for each label, with its total at the end.

    Args:
        axes: where to draw; earlier bars lie above later ones, or stand left of them.
        bars: the parts of each bar by its label. An estimate's `breakdown` is such parts.
        lying: bars to the right instead of upwards.
        unit: what the axis counts; parts are divided by it.
        digits: decimals of the totals.
        colors: a colour for every part that can occur, in the order of stacking.
        ends: texts at the ends of the bars instead of totals.

    Raises:
        KeyError: a part has no colour.
    """
    totals = [sum(parts.values()) / unit for parts in bars.values()]
    for part in (part for parts in bars.values() for part in parts if part not in colors):
        raise KeyError(f"no colour for {part!r}")
    draw = axes.barh if lying else axes.bar
    places, starts = range(len(bars)), [0.0] * len(bars)
    for part, color in colors.items():
        lengths = [parts.get(part, 0) / unit for parts in bars.values()]
        label = getattr(part, "value", part) if max(lengths) > SEEN * max(totals) else None
        begins = {"left" if lying else "bottom": starts}
        draw(places, lengths, 0.65, color=color, label=label, **begins)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    _write_ends(axes, totals, ends or [f"{total:.{digits}f}" for total in totals], lying)
    if lying:
        axes.set_yticks(places, list(bars))
        axes.set_ylim(len(bars) - 0.1, -0.5)  # leaves a strip at the foot for a capacity's name
        axes.set_xlim(0, 1.08 * max(totals))
    else:
        axes.set_xticks(places, list(bars))
        axes.set_ylim(0, 1.1 * max(totals))


def _write_ends(axes: Axes, totals: Sequence[float], texts: Sequence[str], lying: bool) -> None:
    """Writes each text behind the end of its bar; white keeps it readable on a capacity's line."""
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for place, (total, text) in enumerate(zip(totals, texts, strict=True)):
        if lying:
            end, offset, align = (total, place), (3, 0), {"ha": "left", "va": "center"}
        else:
            end, offset, align = (place, total), (0, 2), {"ha": "center", "va": "bottom"}
        axes.annotate(text, end, xytext=offset, textcoords="offset points", bbox=white, **align)


def capacity_line(axes: Axes, value: float, name: str = "", *, upright: bool = False) -> None:
    """Draws a dashed line at what the device has, in the axis's unit, with its name at the end.

    A level line has its name right of the axes, an upright one at its foot, so that neither
    covers what is drawn.
    """
    if upright:
        axes.axvline(value, color=DARK, linewidth=1, linestyle="--")
        place, offset, coordinates = (value, 0), (3, 3), ("data", "axes fraction")
    else:
        axes.axhline(value, color=DARK, linewidth=1, linestyle="--")
        place, offset, coordinates = (1, value), (3, 0), ("axes fraction", "data")
    axes.annotate(
        name,
        place,
        xycoords=coordinates,
        xytext=offset,
        textcoords="offset points",
        va="bottom" if upright else "center",
    )


def legend_below(figure: Figure, columns: int) -> None:
    """Puts one legend under the figure, with each label of all its axes once."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def log_ticks(axes: Axes, values: Sequence[int], base: int = 10) -> None:
    """Makes the level axis logarithmic, with ticks at these values only, as plain numbers."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
