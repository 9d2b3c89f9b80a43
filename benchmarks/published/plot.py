"""Predicted against measured, one panel a quantity, one colour a source."""

from __future__ import annotations

from pathlib import Path

from published.rows import ALLOCATED, DEVICE, RESERVED, SPEED
from published.run import Results

PANELS = ((ALLOCATED, "allocated, GB or GiB"), (RESERVED, "reserved, GB or GiB"), (DEVICE, "device, GB or GiB"), (SPEED, "tokens/s"))


def plot(results: Results, path: Path) -> None:
    """Writes the figure; log axes, the diagonal, and ten per cent on either side of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(quantity, label) for quantity, label in PANELS if any(p.quantity == quantity for p in results.predictions)]
    sources = sorted({p.source for p in results.predictions})
    colours = {source: pyplot.get_cmap("tab10")(i % 10) for i, source in enumerate(sources)}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.2 * len(shown), 4.4), squeeze=False)
    for axis, (quantity, label) in zip(axes[0], shown, strict=True):
        found = [p for p in results.predictions if p.quantity == quantity]
        low, high = min(min(p.measured, p.predicted) for p in found) * 0.8, max(max(p.measured, p.predicted) for p in found) * 1.25
        axis.plot([low, high], [low, high], color="0.4", linewidth=0.8)
        axis.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="0.9")
        for source in sources:
            points = [p for p in found if p.source == source]
            if points:
                axis.scatter(
                    [p.measured for p in points], [p.predicted for p in points], s=14, color=colours[source], label=source, alpha=0.8
                )
        axis.set(
            xscale="log",
            yscale="log",
            xlim=(low, high),
            ylim=(low, high),
            xlabel=f"measured {label}",
            ylabel="predicted",
            title=f"{quantity.replace('_per_', '/')}: {len(found)} rows",
        )
    handles = {text: handle for axis in axes[0] for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
