"""A calibration on the screen: what the device attains, what a layer takes, what to know about
it."""

from __future__ import annotations

from collections.abc import Sequence

from napkinmath.base.units import format_bytes, format_seconds
from napkinmath.calibration.measured_layers import LayerPoint, MeasuredLayers, counts_of
from napkinmath.timing.efficiency import Efficiency, default_efficiency
from rich import box
from rich.console import Console
from rich.table import Table

from napkinmath_profiler.calibration.calibrate import Calibrated
from napkinmath_profiler.calibration.op_points import OpPoint

RATES = {
    "stream_bytes_per_s": "copy, large",
    "l2_bytes_per_s": "reads from L2",
    "decode_instructions_per_s": "4-bit decoding, instructions",
    "pinned_bytes_per_s": "host copy, pinned",
    "pageable_bytes_per_s": "host copy, pageable",
    "kernel_start_s": "start of a kernel",
    "gemm_start_s": "start of a product",
    "dispatch_forward_s": "host, a kernel forward",
    "dispatch_backward_s": "host, a kernel backward",
}


def table(title: str, *columns: str, numbers: int) -> Table:
    """A plain table whose last ``numbers`` columns are figures."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for position, column in enumerate(columns):
        made.add_column(
            column,
            justify="right" if position >= len(columns) - numbers else "left",
            no_wrap=position >= len(columns) - numbers,
        )
    return made


def print_calibrated(found: Calibrated, console: Console, path: str, *, in_cache: bool) -> None:
    """Everything that was measured."""
    console.print(
        f"[bold]{found.device.name}[/bold]  torch {found.stamp['torch']}  driver"
        f" {found.stamp.get('driver', 'none')}",
        highlight=False,
    )
    console.print(rates_table(found.speed))
    if found.layers is not None:
        console.print(layers_table(found.layers))
        classes = classes_table(found.layers)
        if classes is not None:
            console.print(classes)
    print_notes(found.notes, console)
    use = (
        "`estimate` uses it for this device from now on"
        if in_cache and found.device.is_cuda
        else f"use it with `estimate --calibration {path}`"
    )
    console.print(f"written to {path}; {use}", highlight=False, soft_wrap=True)


def print_notes(notes: Sequence[str], console: Console) -> None:
    """What to know about the measurement."""
    for note in notes:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)


def rates_table(speed: Efficiency) -> Table:
    """Measured rates beside those the datasheet implies."""
    made = table("rates", "what", "measured", "implied", "ratio", numbers=3)
    prior = default_efficiency(speed.gpu)
    implied = dict(prior.matmul_flops_per_s)
    for dtype, rate in speed.matmul_flops_per_s:
        if rate != implied[dtype]:
            made.add_row(
                f"matrix products, {dtype}",
                f"{rate / 1e12:.3g} TFLOP/s",
                f"{implied[dtype] / 1e12:.3g} TFLOP/s",
                f"{rate / implied[dtype]:.2f}",
            )
    for name, words in RATES.items():
        measured, expected = getattr(speed, name), getattr(prior, name)
        if measured != expected:
            made.add_row(
                words, _rate(name, measured), _rate(name, expected), f"{measured / expected:.2f}"
            )
    return made


def _rate(name: str, value: float) -> str:
    return (
        f"{value * 1e6:.3g} us"
        if name.endswith("_s") and not name.endswith("per_s")
        else f"{value / 1e9:.4g} G/s"
    )


def layers_table(layers: MeasuredLayers) -> Table:
    """Seconds and bytes of each phase as intercept + slope, and the whole model that follows."""
    kinds = len(set(layers.order))
    names = ["a layer"] if kinds == 1 else [f"a layer of kind {kind}" for kind in range(kinds)]
    title = f"layers of {layers.model} ({layers.what}); {len(layers.order)} in the whole model"
    columns = ("batch x length", "phase", "besides", *names, "whole model", "peak")
    made = table(title, *columns, numbers=4 + kinds - 1)
    for point in layers.points:
        _add_point(made, point, layers.order)
    return made


def _add_point(made: Table, point: LayerPoint, order: tuple[int, ...]) -> None:
    """The phases of one batch and length, and the step that they make."""
    kinds = len(set(order))
    counts = counts_of(order, kinds)
    peaks = point.memory.phase_peaks(order) if point.memory is not None else {}
    place = f"{point.micro_batch_size} x {point.sequence_length}"
    for phase, fit in point.seconds:
        seconds = [format_seconds(s) for s in (fit.intercept, *fit.slopes, fit.at(counts))]
        made.add_row(place, phase, *seconds, format_bytes(peaks[phase]) if phase in peaks else "")
        place = ""
    total = format_seconds(sum(fit.at(counts) for _, fit in point.seconds))
    highest = format_bytes(max(peaks.values())) if peaks else ""
    made.add_row("", "whole step", *[""] * (1 + kinds), total, highest, end_section=True)


def classes_table(layers: MeasuredLayers) -> Table | None:
    """Shares of each phase by kind of operation, in the whole model."""
    counts = counts_of(layers.order, len(set(layers.order)))
    point = next((point for point in layers.points if point.classes), None)
    if point is None:
        return None
    kinds = sorted({kind for _, own in point.classes for kind, _ in own})
    phases = [phase for phase, _ in point.classes]
    place = f"{point.micro_batch_size} x {point.sequence_length}"
    title = f"kinds of operation, {place}, by torch's profiler"
    made = table(title, "share of the phase", *phases, numbers=len(phases))
    shares: dict[str, list[str]] = {kind: [] for kind in kinds}
    for _, own in point.classes:
        seconds = {kind: fit.at(counts) for kind, fit in own}
        total = sum(seconds.values()) or 1.0
        for kind in kinds:
            shares[kind].append(f"{seconds[kind] / total:.0%}" if kind in seconds else "")
    for kind in kinds:
        made.add_row(kind, *shares[kind])
    return made


def ops_table(points: Sequence[OpPoint], speed: Efficiency | None = None) -> Table:
    """Every operation with its spread and what it attains; ``speed`` adds what the time model says
    over what was measured."""
    columns = ["operation", "size (mxnxk)", "median", "spread", "TFLOP/s", "GB/s"]
    columns += ["model"] if speed is not None else []
    made = table("operations", *columns, numbers=len(columns) - 2)
    for point in points:
        case, timing = point.case, point.timing
        if timing is None:
            made.add_row(case.op, case.label, "-")
            continue
        cells = [
            format_seconds(timing.median_s),
            f"{timing.spread:.0%}",
            f"{point.flops_per_s / 1e12:.3g}" if case.flops else "",
            f"{point.bytes_per_s / 1e9:.4g}" if case.moved else "",
        ]
        if speed is not None:
            cells.append(f"{case.predict(speed) / timing.median_s:.2f}" if case.predict else "")
        made.add_row(case.op, case.label, *cells)
    return made


def unmeasured_lines(points: Sequence[OpPoint]) -> list[str]:
    """Why operations have no figure: a line a reason, with what it holds for."""
    found: dict[str, list[str]] = {}
    for point in points:
        if point.timing is None:
            found.setdefault(point.reason, []).append(f"{point.case.op} {point.case.label}")
    return [
        f"not measured: {', '.join(dict.fromkeys(names))}: {reason}"
        for reason, names in found.items()
    ]
