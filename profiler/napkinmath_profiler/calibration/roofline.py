"""The device's roofline as a picture: its measured ceilings, the operations under them, and a
model's own from the estimator's ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from napkinmath.base.errors import InputError, shown
from napkinmath.base.whole_file import write_whole
from napkinmath.estimate import Estimate
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Kernel

from napkinmath_profiler.calibration.op_points import OpPoint

# Two of the colours of the Okabe-Ito palette a kind; black for what was measured of the model.
COLORS = {"gemm": "#0072B2", "attention": "#D55E00", "other": "#009E73"}
ROOF = "#444444"
MARKS = {"gemm": "o", "attention": "s", "other": "^"}
WIDTH_IN, HEIGHT_IN, DPI = 10.0, 6.2, 120
MOST_LABELS = 6


@dataclass(frozen=True, slots=True)
class ModelOp:
    """What one kind of operation of a model's step adds up to: FLOPs, bytes, seconds as priced."""

    name: str
    kind: str
    phase: str
    flops: int
    moved: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved if self.moved else 0.0

    def as_row(self) -> dict[str, Any]:
        """The operation as JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "phase": self.phase,
            "flops": self.flops,
            "moved": self.moved,
            "intensity": self.intensity,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The roof: bytes/s of a large copy, FLOP/s of the best product of each type."""

    bytes_per_s: float
    flops_per_s: dict[str, float]


def ceilings_of(points: Sequence[OpPoint]) -> Ceilings:
    """The best that was measured; InputError where the copy or every product failed."""
    large = max(
        (p for p in points if p.case.op == "copy" and p.timing),
        key=lambda p: p.case.moved,
        default=None,
    )
    products: dict[str, float] = {}
    for point in points:
        if point.case.op == "gemm" and point.timing is not None:
            dtype = point.case.arguments["dtype"]
            products[dtype] = max(products.get(dtype, 0.0), point.flops_per_s)
    if large is None or not products:
        raise InputError(
            "a roofline needs a copy and a matrix product, and neither was measured in time; raise"
            " --budget"
        )
    return Ceilings(large.bytes_per_s, products)


def model_ops_of(model: Estimate) -> list[ModelOp]:
    """The operations of one steady step by name, kind and phase, longest first, without the host's
    own."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for times, segment in model.timeline.segments[model.timeline.step_starts[-1] :].counted():
        if segment.phase is Phase.SAVE:
            continue
        for kernel in segment.kernels:
            totals = found.setdefault(
                (kernel.name, kind_of(kernel), segment.phase.value), [0, 0, 0.0]
            )
            totals[0] += kernel.flops * segment.repeat * times
            totals[1] += kernel.moved * segment.repeat * times
            totals[2] += kernel.seconds * segment.repeat * times
    ops = [
        ModelOp(name, kind, phase, int(flops), int(moved), seconds)
        for (name, kind, phase), (flops, moved, seconds) in found.items()
        if seconds
    ]
    return sorted(ops, key=lambda op: -op.seconds)


def kind_of(kernel: Kernel) -> str:
    """Matrix product, attention, or what moves bytes."""
    if not kernel.flops:
        return "other"
    return "attention" if "attention" in kernel.name or "sdpa" in kernel.name else "gemm"


def write_roofline(
    path: str,
    points: Sequence[OpPoint],
    *,
    title: str,
    ops: Sequence[ModelOp] = (),
    force: bool = False,
) -> None:
    """Writes the picture to a .png or .svg file; InputError for one that is there without
    `force`."""
    if not path.lower().endswith((".png", ".svg")):
        raise InputError(f"--plot {shown(path)} has no known ending; use .png or .svg")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    ceilings = ceilings_of(points)
    left, right = _span(ceilings, points, ops)
    _draw_roof(axes, ceilings, left, right)
    _draw_points(axes, points)
    _draw_model(axes, ops)
    top = max(ceilings.flops_per_s.values())
    lowest = min(p.flops_per_s for p in points if p.timing is not None and p.case.flops)
    _set_axes(axes, (left, right), (min(lowest, ceilings.bytes_per_s * left) / 2, top * 2.5))
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="lower right", fontsize=8, frameon=True, framealpha=0.9)
    form = path[-3:].lower()
    write_whole(path, lambda file: figure.savefig(file, format=form), force=force)


def _set_axes(axes: Any, across: tuple[float, float], up: tuple[float, float]) -> None:
    """Both axes logarithmic, from and to these values."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
    )
    axes.set_xlabel("arithmetic intensity, FLOP / byte")
    axes.set_ylabel("attained, FLOP/s")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _span(
    ceilings: Ceilings, points: Sequence[OpPoint], ops: Sequence[ModelOp]
) -> tuple[float, float]:
    """From a few octaves left of the first operation to right of the last; the ridge always
    between."""
    found = [
        p.case.flops / p.case.moved
        for p in points
        if p.timing is not None and p.case.flops and p.case.moved
    ]
    found += [op.intensity for op in ops if op.flops and op.moved]
    found.append(max(ceilings.flops_per_s.values()) / ceilings.bytes_per_s)
    return min(1.0, min(found) / 4), 2.0 ** (int(log2(max(found))) + 4)


def _draw_roof(axes: Any, ceilings: Ceilings, left: float, right: float) -> None:
    """The slope of the memory, and a flat line for each type of product."""
    rate_of_copy = ceilings.bytes_per_s
    line: dict[str, Any] = {"color": ROOF, "linewidth": 1.4}
    text: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": ROOF}
    ranked = sorted(ceilings.flops_per_s.items(), key=lambda item: -item[1])
    for number, (dtype, rate) in enumerate(ranked):
        style = ("-", "--", ":", "-.")[number % 4]
        axes.plot([rate / rate_of_copy, right], [rate, rate], linestyle=style, **line)
        label = f"{dtype}  {rate / 1e12:.3g} TFLOP/s"
        axes.annotate(label, (right, rate), xytext=(-4, 4), ha="right", **text)
    ridge = max(ceilings.flops_per_s.values()) / rate_of_copy
    axes.plot([left, ridge], [rate_of_copy * left, rate_of_copy * ridge], **line)
    label = f"copy  {rate_of_copy / 1e9:.3g} GB/s"
    axes.annotate(label, (left, rate_of_copy * left), xytext=(10, 2), rotation=0, **text)


def _draw_points(axes: Any, points: Sequence[OpPoint]) -> None:
    for kind in ("gemm", "attention"):
        here = [p for p in points if p.case.op == kind and p.timing is not None and p.case.moved]
        if here:
            xs, ys = [p.case.flops / p.case.moved for p in here], [p.flops_per_s for p in here]
            axes.scatter(
                xs,
                ys,
                s=26,
                marker=MARKS[kind],
                color=COLORS[kind],
                alpha=0.85,
                linewidths=0,
                label=f"{kind}, measured",
            )


def _draw_model(axes: Any, ops: Sequence[ModelOp]) -> None:
    """A model's operations at their intensity, area by share of the step; those that move bytes
    only stand at the left edge."""
    counted = [op for op in ops if op.seconds > 0]
    total = sum(op.seconds for op in counted)
    for kind in ("gemm", "attention"):
        here = [op for op in counted if op.kind == kind]
        if here:
            axes.scatter(
                [op.intensity for op in here],
                [op.flops / op.seconds for op in here],
                s=[24 + 900 * op.seconds / total for op in here],
                marker=MARKS[kind],
                facecolors="none",
                edgecolors=COLORS[kind],
                linewidths=1.4,
                label=f"{kind} of the model, priced",
            )
    moving = [op for op in counted if op.kind == "other"]
    if moving:
        share = sum(op.seconds for op in moving) / total
        axes.plot([], [], " ", label=f"no FLOPs, bytes only: {share:.0%} of the model's step")
    _list_shares(axes, [f"{op.seconds / total:4.0%}  {op.name}, {op.phase}" for op in counted])


def _list_shares(axes: Any, shares: Sequence[str]) -> None:
    """A box with the largest shares of the step."""
    if not shares:
        return
    text = "\n".join(["share of the step, priced", *shares[:MOST_LABELS]])
    padded = "round,pad=0.4"
    box = {"facecolor": "white", "edgecolor": "#cccccc", "alpha": 0.9, "boxstyle": padded}
    axes.text(0.012, 0.98, text, transform=axes.transAxes, va="top", fontsize=8, bbox=box)
