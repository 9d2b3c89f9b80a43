"""Rates from measured operations: the few constants of the time model that make it agree with them
best, on the model's own formulas.

Each group of constants is fitted to the operations it governs by coordinate descent on the mean
absolute error of the logarithm. A weak pull towards the datasheet's value leaves what the points do
not determine where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, sqrt
from typing import Any

from napkinmath.calibration.calibration import NOT_RATES
from napkinmath.timing.attainable import AttentionCurve
from napkinmath.timing.efficiency import Efficiency

from napkinmath_profiler.calibration.op_points import OpPoint

PULL = 0.001
SMOOTH = 0.02  # errors below this count less and less, so that the descent does not stop at a kink
STEPS = (2.0, 1.4, 1.15, 1.05, 1.015, 1.004)
ROUNDS = 12
LEAST, MOST = 1e-18, 1e18
# Caches of GPUs read 3 to 5 times as fast as their memory, those of processors up to 8.
MOST_L2_OVER_STREAM = 10.0

Setter = Callable[[Efficiency, float], Efficiency]


class Constant:
    """One number of an `Efficiency` that a fit may move."""

    def __init__(
        self, read: Callable[[Efficiency], float], write: Setter, *, high: float = MOST
    ) -> None:
        self.read, self.write, self.high = read, write, high


def field(name: str, *, high: float = MOST) -> Constant:
    """A plain field."""
    return Constant(
        lambda e: getattr(e, name), lambda e, value: e.replace(**{name: value}), high=high
    )


def matmul_rate(dtype: str) -> Constant:
    """The rate of a format's products."""

    def write(e: Efficiency, value: float) -> Efficiency:
        return e.replace(
            matmul_flops_per_s=tuple({**dict(e.matmul_flops_per_s), dtype: value}.items())
        )

    return Constant(lambda e: dict(e.matmul_flops_per_s)[dtype], write)


def curve(kernel: str, name: str, *, high: float = MOST) -> Constant:
    """A field of an attention kernel's curve."""

    def write(e: Efficiency, value: float) -> Efficiency:
        curves: dict[str, AttentionCurve] = dict(e.attention)
        return e.replace(
            attention=tuple({**curves, kernel: curves[kernel].replace(**{name: value})}.items())
        )

    return Constant(lambda e: getattr(dict(e.attention)[kernel], name), write, high=high)


class _Fit:
    """The speeds as fitted so far, and the points that they are to agree with."""

    def __init__(self, prior: Efficiency, points: Sequence[OpPoint]) -> None:
        self.speed = _started(prior, points)
        self._prior = prior
        self._usable = [
            point for point in points if point.timing is not None and point.case.predict is not None
        ]

    def points(self, op: str, **arguments: Any) -> list[OpPoint]:
        """Those of an operation with these arguments."""
        return [
            point
            for point in self._usable
            if point.case.op == op
            and all(point.case.arguments.get(key) == value for key, value in arguments.items())
        ]

    def values_of(self, op: str, argument: str) -> list[str]:
        """What an argument of an operation is in the points."""
        return sorted({point.case.arguments[argument] for point in self.points(op)})

    def move(self, constants: Sequence[Constant], op: str, **arguments: Any) -> None:
        """Fits the constants to the points of an operation."""
        points = self.points(op, **arguments)
        self.speed = fit(self.speed, self._prior, constants, points)


def fitted(prior: Efficiency, points: Sequence[OpPoint]) -> Efficiency:
    """The speeds that agree best with the points."""
    found = _Fit(prior, points)
    stream, start = field("stream_bytes_per_s"), field("kernel_start_s")
    found.move([stream, field("l2_bytes_per_s"), start], "copy")
    most = MOST_L2_OVER_STREAM * found.speed.stream_bytes_per_s
    if found.speed.l2_bytes_per_s > most:  # more of the small copies hits than the model grants
        found.speed = found.speed.replace(l2_bytes_per_s=most)
        found.move([stream, start], "copy")
    found.move([field("eager_share", high=1.0)], "elementwise")
    rates = [matmul_rate(dtype) for dtype in found.values_of("gemm", "dtype")]
    shape = [field(name) for name in ("gemm_start_s", "wave_start_s", "feed_cost")]
    found.move([*rates, *shape, field("unaligned_share", high=1.0)], "gemm")
    for kernel in found.values_of("attention", "kernel"):
        for backward, prefix in ((False, ""), (True, "backward_")):
            constants = [curve(kernel, f"{prefix}share"), curve(kernel, f"{prefix}other")]
            found.move(constants, "attention", kernel=kernel, backward=backward)
    found.move([field("decode_instructions_per_s")], "dequantize", provider="bitsandbytes")
    host = ("pinned_bytes_per_s", "pageable_bytes_per_s", "host_copy_start_s")
    found.move([field(name) for name in host], "host copy")
    return found.speed


def _started(e: Efficiency, points: Sequence[OpPoint]) -> Efficiency:
    """The start of a kernel as a graph of empty ones shows it; issued one by one they show the
    host's part instead."""
    for point in points:
        if point.case.op == "launch" and point.timing is not None:
            each = point.timing.median_s / point.case.arguments["count"]
            if point.case.arguments["how"] == "graph" or not any(
                p.timing and p.case.arguments.get("how") == "graph" for p in points
            ):
                e = e.replace(kernel_start_s=each)
    return e


def fit(
    e: Efficiency, prior: Efficiency, constants: Sequence[Constant], points: Sequence[OpPoint]
) -> Efficiency:
    """Move the constants, alone and in pairs against each other, in ever smaller steps to where the
    points' error is least."""
    if not points:
        return e
    best = cost(e, prior, constants, points)
    for _ in range(ROUNDS):
        before = best
        for step in STEPS:
            for move in _moves(constants, step):
                while (moved := _moved(e, move)) is not None and (
                    found := cost(moved, prior, constants, points)
                ) < best - 1e-9:
                    e, best = moved, found
        if before - best < 1e-5:
            break
    return e


Move = tuple[tuple[Constant, float], ...]


def _moves(constants: Sequence[Constant], step: float) -> list[Move]:
    """Each constant up and down; each pair in opposite directions, along the valley where one makes
    up for the other."""
    alone: list[Move] = [
        ((constant, factor),) for constant in constants for factor in (step, 1 / step)
    ]
    return alone + [((a, step), (b, 1 / step)) for a in constants for b in constants if a is not b]


def _moved(e: Efficiency, move: Move) -> Efficiency | None:
    for constant, factor in move:
        value = constant.read(e) * factor
        if not LEAST < value <= constant.high:
            return None
        e = constant.write(e, value)
    return e


def cost(
    e: Efficiency, prior: Efficiency, constants: Sequence[Constant], points: Sequence[OpPoint]
) -> float:
    """Mean error of the logarithm, and the pull towards the prior."""
    errors = [sqrt(error(point, e) ** 2 + SMOOTH**2) for point in points]
    pull = sum(abs(log(c.read(e) / c.read(prior))) for c in constants)
    return sum(errors) / len(errors) + PULL * pull


def error(point: OpPoint, e: Efficiency) -> float:
    """Logarithm of predicted over measured seconds."""
    assert point.timing is not None and point.case.predict is not None
    return log(point.case.predict(e) / point.timing.median_s)


def rates_of(e: Efficiency) -> dict[str, Any]:
    """The speeds as the calibration file's `rates`."""
    found: dict[str, Any] = {}
    for name, value in e.items():
        if name == "matmul_flops_per_s":
            found[name] = dict(value)
        elif name == "attention":
            found[name] = {kernel: dict(one.items()) for kernel, one in value}
        elif name not in NOT_RATES:
            found[name] = value
    return found
