"""Predicted over measured, and memory over two steps, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from napkinmath.base.units import GIB, MIB
from napkinmath.base.whole_file import write_whole

from campaign_parts.histories import History, read_histories

DECADE = 10  # a logarithmic axis below this spread has no room for its labels
COLORS = {"traced": "tab:blue", "analytic": "tab:orange", "calibrated": "tab:green"}
PHASE_COLORS = {
    "forward": "tab:blue",
    "loss": "tab:cyan",
    "backward": "tab:orange",
    "recompute": "tab:red",
    "clip": "tab:brown",
    "optimizer": "tab:green",
}
MOST_HISTORIES = 12


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_accuracy(results: Sequence[Any], quantities: Sequence[Any], path: Path) -> None:
    """One panel a quantity: errors in per cent of the measured value, a point a case, sorted by
    what was measured."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(q.name for q in quantities))
    shown = [
        n
        for n in names
        if any(r.error(q) is not None for q in quantities if q.name == n for r in results)
    ]
    figure, axes = pyplot.subplots(
        1,
        max(1, len(shown)),
        figsize=(4.6 * max(1, len(shown)), 3.8),
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes[0], shown, strict=False):
        sizes = [
            m
            for q in quantities
            if q.name == name
            for r in results
            if (m := q.measured(r.measured)) and r.error(q) is not None
        ]
        unit, unit_name = (
            (1e-3, "ms")
            if name == "step time"
            else (GIB, "GiB")
            if max(sizes) >= GIB
            else (MIB, "MiB")
        )
        for quantity in (q for q in quantities if q.name == name):
            points = [
                (quantity.measured(r.measured), r.error(quantity))
                for r in results
                if r.error(quantity) is not None
            ]
            if points:
                label = f"{quantity.side} ({len(points)})"
                axis.scatter(
                    [m / unit for m, _ in points],
                    [100 * e for _, e in points],
                    s=18,
                    alpha=0.8,
                    color=COLORS[quantity.side],
                    label=label,
                )
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set(
            xlabel=f"measured {name}, {unit_name}", ylabel="predicted less measured, %", title=name
        )
        if max(sizes) > DECADE * min(sizes):
            _plain_log(axis)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110), force=True)
    pyplot.close(figure)


def _plain_log(axis: Any) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5 of each power of ten; the other marks
    have none, since they would overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def draw_histories(folder: Path, path: Path) -> None:
    """Requested bytes over the events of a recording, one panel a case, coloured by phase; nothing
    without recorded events."""
    histories = list(islice(read_histories(folder), MOST_HISTORIES))
    if not histories:
        return
    pyplot = _pyplot()
    columns = min(3, len(histories))
    figure, axes = pyplot.subplots(
        -(-len(histories) // columns),
        columns,
        figsize=(5 * columns, 2.8 * -(-len(histories) // columns)),
        squeeze=False,
        layout="constrained",
    )
    for axis, history in zip(axes.flat, histories, strict=False):
        _draw_history(axis, history)
    for axis in axes.flat[len(histories) :]:
        axis.set_visible(False)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=100), force=True)
    pyplot.close(figure)


def _draw_history(axis: Any, history: History) -> None:
    sizes: dict[int, int] = {}
    live, heights, phases = sum(history.held_before), [], []
    for booking in history.bookings:
        if booking.is_allocation:
            sizes[booking.key] = -(-booking.nbytes // 512) * 512
            live += sizes[booking.key]
        else:
            live -= sizes.pop(booking.key, 0)
        heights.append(live)
        phases.append(phase_of(history.parts[booking.part]))
    unit, name = (GIB, "GiB") if max(heights) >= GIB // 4 else (MIB, "MiB")
    for phase, color in PHASE_COLORS.items():
        inside = [
            h / unit if p == phase else float("nan") for h, p in zip(heights, phases, strict=True)
        ]
        if any(p == phase for p in phases):
            axis.plot(inside, color=color, linewidth=1, label=phase)
    axis.plot([h / unit for h in heights], color="0.7", linewidth=0.6, zorder=0)
    axis.set(ylim=(0, None), ylabel=name, xlabel="event")
    axis.set_title(history.case, fontsize=6, wrap=True)
    axis.legend(fontsize=6)


def phase_of(part: str) -> str:
    """The phase that a part of a recording is coloured by: 'backward 1' is the backward of the
    second step."""
    name = part.rstrip("0123456789 ")
    return {"step": "optimizer", "zero_grad": "optimizer"}.get(name, name)
