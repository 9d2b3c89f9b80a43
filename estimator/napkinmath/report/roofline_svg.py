"""The roofline of one step: its products and attention by FLOPs a byte and FLOP/s, under what the
GPU moves and computes at best."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10

from napkinmath.base.record import Record
from napkinmath.ir.ledger import Phase
from napkinmath.report.words import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.answers.estimate import Estimate

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
MOST_LABELS = 6
COLOURS = {Phase.FORWARD: "#4e79a7", Phase.BACKWARD: "#d37222"}
OTHER = "#59a14f"


class RooflinePoint(Record):
    """What one operation adds up to in one phase of a steady step."""

    name: str
    phase: Phase
    flops: float
    moved: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


def points_of(e: Estimate) -> tuple[list[RooflinePoint], float]:
    """(operations that compute, longest first; seconds of those that only move bytes)."""
    found: dict[tuple[str, Phase], list[float]] = {}
    moving = 0.0
    for times, segment in e.timeline.segments[e.timeline.step_starts[-1] :].counted():
        if segment.phase in (Phase.SAVE, Phase.EVALUATE, Phase.ROLLOUT):
            continue
        number = times * segment.repeat
        for kernel in segment.kernels:
            if not kernel.flops or not kernel.moved or not kernel.seconds:
                moving += kernel.seconds * number
                continue
            totals = found.setdefault((kernel.name, segment.phase), [0.0, 0.0, 0.0])
            for i, value in enumerate((kernel.flops, kernel.moved, kernel.seconds)):
                totals[i] += value * number
    points = [
        RooflinePoint(name=name, phase=phase, flops=f, moved=m, seconds=s)
        for (name, phase), (f, m, s) in found.items()
    ]
    return sorted(points, key=lambda p: -p.seconds), moving


def roofline_svg(e: Estimate) -> str:
    """The picture; empty where the GPU's speed is not known."""
    if e.time is None or e.hardware is None:
        return ""
    points, moving = points_of(e)
    if not points:
        return ""
    peak, bandwidth = e.time.peak_flops_per_s, float(e.hardware.gpu.bandwidth_bytes_per_s)
    plane = _Plane(points, peak, bandwidth)
    share = moving / (moving + sum(p.seconds for p in points))
    text = (
        f"{share:.0%} of the GPU's time only moves bytes and has no place here; a circle's area is"
        " its share of the rest"
    )
    body = [
        *plane.axes(),
        *plane.roof(e.hardware.gpu.name),
        *plane.circles(points),
        _text(LEFT, HEIGHT - 4, text, size=10, colour="#586273"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="11" fill="#1d2430">{"".join(body)}</svg>'
    )


class _Plane:
    """Both logarithmic axes, wide enough for the points and the ridge."""

    def __init__(self, points: Sequence[RooflinePoint], peak: float, bandwidth: float) -> None:
        self.peak, self.bandwidth = peak, bandwidth
        intensities = [*(p.intensity for p in points), peak / bandwidth]
        rates = [*(p.rate for p in points), peak]
        self.x0, self.x1 = floor(log10(min(intensities))), ceil(log10(max(intensities)) + 0.1)
        self.y0, self.y1 = floor(log10(min(rates))), ceil(log10(max(rates)) + 0.05)

    def x(self, intensity: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(intensity) - self.x0) / (self.x1 - self.x0)

    def y(self, rate: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (HEIGHT - TOP - BOTTOM) * (log10(rate) - self.y0) / (self.y1 - self.y0)
        )

    def axes(self) -> list[str]:
        found: list[str] = []
        for power in range(self.x0, self.x1 + 1):
            x = self.x(10.0**power)
            found += [
                _line(x, TOP, x, HEIGHT - BOTTOM, "#e3e7ed"),
                _text(x, HEIGHT - BOTTOM + 14, f"{10.0**power:g}", anchor="middle"),
            ]
        for power in range(self.y0, self.y1 + 1):
            y = self.y(10.0**power)
            found += [
                _line(LEFT, y, WIDTH - RIGHT, y, "#e3e7ed"),
                _text(LEFT - 6, y + 4, _flops(10.0**power), anchor="end"),
            ]
        found.append(
            _text(
                (LEFT + WIDTH - RIGHT) / 2,
                HEIGHT - BOTTOM + 28,
                "FLOP a byte moved",
                anchor="middle",
            )
        )
        return [*found, _text(6, 14, "FLOP/s")]

    def roof(self, gpu: str) -> list[str]:
        ridge = self.peak / self.bandwidth
        left = max(10.0**self.x0, 10.0**self.y0 / self.bandwidth)
        top = self.y(self.peak)
        label = f"{gpu}: {_flops(self.peak)}FLOP/s, {self.bandwidth / 1e9:,.0f} GB/s"
        return [
            _line(
                self.x(left),
                self.y(left * self.bandwidth),
                self.x(ridge),
                top,
                "#1d2430",
                width=1.5,
            ),
            _line(self.x(ridge), top, WIDTH - RIGHT, top, "#1d2430", width=1.5),
            _text(WIDTH - RIGHT, TOP - 12, label, anchor="end"),
        ]

    def circles(self, points: Sequence[RooflinePoint]) -> list[str]:
        whole = sum(p.seconds for p in points)
        found: list[str] = []
        taken: list[tuple[float, float]] = []
        labelled = min(MOST_LABELS, len(points))
        for number, p in enumerate(points):
            x, y, radius = self.x(p.intensity), self.y(p.rate), 3 + 26 * (p.seconds / whole) ** 0.5
            colour = COLOURS.get(p.phase, OTHER)
            found.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"'
                f' fill-opacity="0.55" stroke="{colour}"/>'
            )
            if number >= labelled:
                continue
            beside = _free_height(x + radius, y + 4, taken)
            taken.append((x + radius, beside))
            found.append(_text(x + radius + 3, beside, str(number + 1), size=10))
            legend = HEIGHT - BOTTOM - 8 - 14 * (labelled - 1 - number)
            found.append(self._legend(number + 1, p, p.seconds / whole, legend))
        return found

    def _legend(self, number: int, p: RooflinePoint, share: float, y: float) -> str:
        """What the numbered circle is, at the right edge."""
        text = (
            f"{number}  {printable(p.name)}, {p.phase.value}: {share:.0%} of the time,"
            f" {p.rate / self.peak:.0%} of peak"
        )
        colour = COLOURS.get(p.phase, OTHER) if p.phase is Phase.FORWARD else "#9a4a0b"
        return _text(WIDTH - RIGHT - 4, y, text, anchor="end", size=10, colour=colour)


def _free_height(x: float, y: float, taken: Sequence[tuple[float, float]]) -> float:
    """The height at or above `y` at which a number stands on no other."""
    while any(abs(y - other) < 11 and abs(x - near) < 20 for near, other in taken):
        y -= 11
    return y


def _flops(rate: float) -> str:
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} "


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1.0) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{width:g}"/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, colour: str = "#1d2430"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{colour}">{escape(text)}</text>'
    )
