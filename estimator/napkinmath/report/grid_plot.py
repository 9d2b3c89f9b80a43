"""A sweep drawn with matplotlib (the extra `plots`): a heat map of two numbers that vary, lines of
one; GPU capacities drawn in."""

from __future__ import annotations

import os
from importlib import import_module

from napkinmath.base.errors import InputError, shown
from napkinmath.base.installing import pip_install
from napkinmath.base.units import GIB
from napkinmath.base.whole_file import refuse_existing, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.planning.grid import Grid

INK, FAINT, GRID_LINE = "#1d2733", "#5c6873", "#dfe4e8"
_TITLES = {
    "bs": "batch",
    "ctx": "sequence length",
    "rank": "LoRA rank",
    "grad_accum": "gradient accumulation",
    "gpus": "GPUs",
}
# Capacities that are drawn in where no GPU is named: box sizes, of which the driver and the CUDA
# context keep about 0.8 GiB.
_CARDS = (8, 16, 24, 48, 80, 141, 192)
_KEPT_GIB = 0.8
_LINE_COLORS = (
    "#3b6fb6",
    "#c8781e",
    "#3f8f4f",
    "#a04a9c",
    "#b5362c",
    "#4a9aa8",
    "#7d6a2f",
    "#5b3a8c",
)


def write_plot(
    grid: Grid,
    rows: Sequence[tuple[Any, ...]],
    path: str,
    *,
    show: str = "memory",
    force: bool = False,
) -> None:
    """Draws the rows; raises InputError where nothing numeric varies, or matplotlib is missing."""
    if os.path.splitext(path)[1].lower() not in (".png", ".svg"):
        raise InputError(f"--plot {shown(path)} has no known ending; use .png or .svg")
    if show not in ("memory", "tokens/s"):
        raise InputError(f"--show {shown(show)} is unknown; use memory or tokens/s")
    refuse_existing(path, force)
    numeric = [
        key for key in grid.keys if all(isinstance(row[grid.names.index(key)], int) for row in rows)
    ]
    if not numeric:
        raise InputError("--plot needs a number that varies; give e.g. --bs 1..64 or --ctx 1k..64k")
    figure, axes = new_figure(width=0.86)
    value, label = _value(grid, rows, show)
    cards = _cards(grid)
    if len(numeric) > 1 and len(grid.keys) == 2:
        keys = ["ctx", *[k for k in numeric if k != "ctx"]] if "ctx" in numeric else numeric
        _heat(figure, axes, grid, rows, keys[:2], value, show, cards)
    else:
        _lines(axes, grid, rows, numeric[-1], value, show, cards)
    lines = "; lines: where a GPU is full, its CUDA context taken off" if show == "memory" else ""
    figure.text(0.09, 0.94, label, fontsize=13, fontweight="bold", color=INK)
    subtitle(figure, (grid.summary + lines)[:150])
    save(figure, path)


def new_figure(*, width: float) -> tuple[Any, Any]:
    """(an empty figure, its axes, as wide as that share of it)."""
    figures, agg = load_matplotlib("figure"), load_matplotlib("backends.backend_agg")
    figure = figures.Figure(figsize=(9.6, 6.0), dpi=150, facecolor="white")
    agg.FigureCanvasAgg(figure)
    return figure, figure.add_axes((0.09, 0.11, width, 0.76))


def subtitle(figure: Any, text: str) -> None:
    """The line under a figure's title."""
    figure.text(0.09, 0.9, text, fontsize=8.5, color=FAINT, parse_math=False)


def open_frame(axes: Any) -> None:
    """A faint grid behind what is drawn, and no frame above it and on its right."""
    axes.grid(color=GRID_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Any, path: str) -> None:
    """Writes a figure without the date and the program's name."""
    form = os.path.splitext(path)[1].lower().removeprefix(".")
    unstamped = {"Date": None} if form == "svg" else {"Software": None}
    write_whole(
        path, lambda file: figure.savefig(file, format=form, metadata=unstamped), force=True
    )


def _value(grid: Grid, rows: Sequence[tuple[Any, ...]], show: str) -> tuple[list[float], str]:
    """One number a row, in GiB or tokens/s, and its name."""
    if show == "tokens/s":
        index = grid.names.index("tokens_per_s")
        if any(row[index] is None for row in rows):
            raise InputError("--show tokens/s needs a GPU with known speeds; add --gpu NAME")
        return [row[index] for row in rows], "tokens/s"
    name = "allocated_bytes" if "allocated_bytes" in grid.names else "requested_bytes"
    index = grid.names.index(name)
    what = "allocated" if name == "allocated_bytes" else "requested"
    return [row[index] / GIB for row in rows], f"peak memory {what} by tensors, GiB"


def _heat(
    figure: Any,
    axes: Any,
    grid: Grid,
    rows: Sequence[tuple[Any, ...]],
    keys: list[str],
    value: list[float],
    show: str,
    cards: dict[str, float],
) -> None:
    import numpy as np

    x_at, y_at = (grid.names.index(key) for key in keys)
    xs, ys = sorted({row[x_at] for row in rows}), sorted({row[y_at] for row in rows})
    field: Any = np.full((len(ys), len(xs)), np.nan)
    for row, number in zip(rows, value, strict=True):
        field[ys.index(row[y_at]), xs.index(row[x_at])] = number
    positive = field[np.isfinite(field)]
    wide = show == "memory" and positive.max() > 4 * positive.min()
    norm = load_matplotlib("colors").LogNorm(positive.min(), positive.max()) if wide else None
    palette = "YlGnBu" if show == "memory" else "viridis"
    image = axes.imshow(field, origin="lower", aspect="auto", cmap=palette, norm=norm)
    if show == "memory" and min(len(xs), len(ys)) > 1:
        _contours(axes, field, cards)
    _ticks(axes.set_xticks, xs)
    _ticks(axes.set_yticks, ys)
    axes.set_xlabel(_TITLES.get(keys[0], keys[0]), color=FAINT)
    axes.set_ylabel(_TITLES.get(keys[1], keys[1]), color=FAINT)
    if field.size <= 120:
        _cell_numbers(axes, field, norm)
    _color_bar(figure, axes, image)


def _color_bar(figure: Any, axes: Any, image: Any) -> None:
    ticker = load_matplotlib("ticker")
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.045)
    bar.ax.tick_params(colors=FAINT, labelsize=8)
    bar.ax.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    bar.outline.set_visible(False)


def _cards(grid: Grid) -> dict[str, float]:
    """GiB that tensors can take on each GPU named, or on cards of the usual sizes."""
    if not grid.hardware:
        return {f"{card} GiB": card - _KEPT_GIB for card in _CARDS}
    return {h.gpu.name: h.usable_bytes / GIB for h in grid.hardware.values()}


def _contours(axes: Any, field: Any, cards: dict[str, float]) -> None:
    """Lines along which each GPU is full."""
    levels = {
        level: name
        for name, level in sorted(cards.items(), key=lambda item: item[1])
        if field.min() < level < field.max()
    }
    if not levels:
        return
    lines = axes.contour(field, levels=list(levels), colors=INK, linewidths=1.1)
    labels = axes.clabel(lines, fmt=levels, fontsize=8, inline=True)
    halo = load_matplotlib("patheffects").withStroke(linewidth=2.5, foreground="white")
    for text in labels or ():
        text.set_path_effects([halo])


def _cell_numbers(axes: Any, field: Any, norm: Any) -> None:
    top = float(field[field == field].max())
    for y in range(field.shape[0]):
        for x in range(field.shape[1]):
            number = field[y, x]
            if number == number:
                share = norm(number) if norm is not None else number / top
                axes.text(
                    x,
                    y,
                    f"{number:.3g}" if number < 1000 else f"{number:,.0f}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if share > 0.6 else INK,
                )


def _ticks(place: Any, numbers: Sequence[int]) -> None:
    every = max(1, -(-len(numbers) // 12))
    place(range(0, len(numbers), every), [_short(n) for n in numbers[::every]])


def _short(number: int) -> str:
    """1024 -> '1k'."""
    return f"{number >> 10}k" if number >= 1024 and not number % 1024 else str(number)


def _lines(
    axes: Any,
    grid: Grid,
    rows: Sequence[tuple[Any, ...]],
    key: str,
    value: list[float],
    show: str,
    cards: dict[str, float],
) -> None:
    x_at = grid.names.index(key)
    others = [
        grid.names.index(k) for k in grid.keys if k != key and not (k == "gpu" and show == "memory")
    ]  # lines of GPUs lie on one another
    series: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row, number in zip(rows, value, strict=True):
        points = series.setdefault(tuple(row[i] for i in others), [])
        if not points or points[-1][0] < row[x_at]:
            points.append((row[x_at], number))
    if len(series) > 24:
        raise InputError(
            f"{len(series)} lines cannot be distinguished; vary two numbers for a heat map, or"
            " fewer options"
        )
    _draw_series(axes, series)
    if show == "memory":
        _draw_capacities(axes, cards, 0.25 * min(value), 1.15 * max(value))
    _number_axis(axes, sorted({row[x_at] for row in rows}))
    axes.set_ylim(0, None)
    axes.set_xlabel(_TITLES.get(key, key), color=FAINT)
    open_frame(axes)
    if len(series) > 1:
        axes.legend(
            frameon=False,
            fontsize=8.5,
            title=", ".join(grid.names[i] for i in others),
            title_fontsize=8.5,
        )


def _draw_series(axes: Any, series: dict[tuple[Any, ...], list[tuple[int, float]]]) -> None:
    for number, (name, points) in enumerate(series.items()):
        points.sort()
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            ("-", "--", ":")[number // len(_LINE_COLORS) % 3],
            color=_LINE_COLORS[number % len(_LINE_COLORS)],
            linewidth=1.8,
            marker="o" if len(points) < 20 else None,
            markersize=3.5,
            label=", ".join(map(str, name)),
        )


def _draw_capacities(axes: Any, cards: dict[str, float], low: float, high: float) -> None:
    """A line at the capacity of each card that is about as large as what is drawn."""
    for name, level in cards.items():
        if low < level < high:
            axes.axhline(level, color=FAINT, linewidth=0.8, linestyle=(0, (5, 4)))
            axes.annotate(
                name,
                (1, level),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=FAINT,
            )


def _number_axis(axes: Any, numbers: Sequence[int]) -> None:
    """Ticks at the numbers there are, or some of them; powers of two where they span three."""
    ticks = numbers if len(numbers) <= 12 else numbers[:: -(-len(numbers) // 10)]
    if numbers[-1] >= 8 * numbers[0] and numbers[0] > 0:
        axes.set_xscale("log", base=2)
        ticks = [number for number in numbers if not number & (number - 1)] or ticks
    axes.set_xticks(ticks, [_short(n) for n in ticks])
    axes.minorticks_off()


def load_matplotlib(module: str) -> Any:
    """A module of matplotlib; InputError names the extra where it is missing."""
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError:
        raise InputError(f"--plot needs matplotlib: {pip_install('plots')}") from None
