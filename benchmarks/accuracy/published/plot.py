"""Predicted against measured, one panel a quantity, one colour a source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from published.predict import Prediction
from published.rows import ALLOCATED, DEVICE, RESERVED, SPEED
from published.run import Results

PANELS = (
    (ALLOCATED, "allocated, GB"),
    (DEVICE, "device (nvidia-smi or not stated), GB"),
    (RESERVED, "reserved, GB"),
    (SPEED, "tokens a second"),
)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def plot(results: Results, path: Path) -> None:
    """Writes the figure: log axes, the diagonal, ten per cent on either side of it, and each
    prediction's range as a bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [
        (quantity, label)
        for quantity, label in PANELS
        if any(p.quantity == quantity for p in results.predictions)
    ]
    sources = sorted({p.source for p in results.predictions})
    looks = {
        source: (pyplot.get_cmap("tab10")(i % 10), MARKS[i % len(MARKS)])
        for i, source in enumerate(sources)
    }
    columns = min(2, len(shown))
    legend_in = 0.2 * (-(-len(sources) // 3) + 1)  # inches of three columns of names
    lines = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns, 5.0 * lines + legend_in), squeeze=False
    )
    for axis, (quantity, label) in zip(axes.flat, shown, strict=False):
        _panel(axis, [p for p in results.predictions if p.quantity == quantity], label, looks)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_axis_off()
    handles = {
        text: handle
        for axis in axes.flat
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        [name.partition(" (")[0] for name in handles],
        loc="lower center",
        ncol=3,
        fontsize=8,
        frameon=False,
    )
    figure.tight_layout(rect=(0, legend_in / (5.0 * lines + legend_in), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def in_gigabytes(p: Prediction) -> Prediction:
    """A prediction in 10^9 bytes, so that one axis serves tables in GB and in GiB."""
    scale = 1.073741824 if p.unit == "GiB" else 1.0
    return replace(
        p,
        predicted=p.predicted * scale,
        measured=p.measured * scale,
        low=p.low * scale,
        high=p.high * scale,
    )


def _panel(
    axis: Any, found: list[Prediction], label: str, looks: dict[str, tuple[Any, str]]
) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = [in_gigabytes(p) for p in found]

    low, high = (
        min(min(p.measured, p.predicted) for p in found) * 0.8,
        max(max(p.measured, p.predicted) for p in found) * 1.25,
    )
    axis.fill_between(
        [low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="0.91", zorder=0
    )
    axis.plot([low, high], [low, high], color="0.4", linewidth=0.8, zorder=1)
    for source, (colour, mark) in looks.items():
        points = [p for p in found if p.source == source]
        if not points:
            continue
        axis.vlines(
            [p.measured for p in points],
            [p.low for p in points],
            [p.high for p in points],
            color=colour,
            linewidth=0.7,
            alpha=0.35,
        )
        axis.scatter(
            [p.measured for p in points],
            [p.predicted for p in points],
            s=18,
            color=colour,
            marker=mark,
            label=source,
            alpha=0.85,
            linewidths=0,
            zorder=3,
        )
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel=f"measured {label}",
        ylabel="predicted",
        title=f"{len(found)} measurements",
        aspect="equal",
    )
    steps = (1, 2, 5) if high < 1000 * low else (1,)
    ticks = [step * 10**power for power in range(7) for step in steps]
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
        one.set_minor_locator(NullLocator())
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
