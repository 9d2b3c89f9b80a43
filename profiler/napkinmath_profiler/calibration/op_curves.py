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

from napkinmath.timing.attainable import AttentionCurve
from napkinmath.timing.efficiency import Efficiency

from napkinmath_profiler.calibration.op_points import OpPoint

PULL = 0.001
SMOOTH = 0.02  # errors below this count less and less, so that the descent does not stop at a kink
STEPS = (2.0, 1.4, 1.15, 1.05, 1.015, 1.004)
ROUNDS = 12
LEAST, MOST = 1e-18, 1e18
MOST_L2_OVER_STREAM = (
    10.0  # caches of GPUs read 3 to 5 times as fast as their memory, those of processors up to 8
)

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


def fitted(prior: Efficiency, points: Sequence[OpPoint]) -> Efficiency:
    """The speeds that agree best with the points."""
    usable = [
        point for point in points if point.timing is not None and point.case.predict is not None
    ]

    def of(op: str, **arguments: Any) -> list[OpPoint]:
        return [
            p
            for p in usable
            if p.case.op == op
            and all(p.case.arguments.get(key) == value for key, value in arguments.items())
        ]

    e = _started(prior, points)
    e = fit(
        e,
        prior,
        [field("stream_bytes_per_s"), field("l2_bytes_per_s"), field("kernel_start_s")],
        of("copy"),
    )
    if (
        e.l2_bytes_per_s > MOST_L2_OVER_STREAM * e.stream_bytes_per_s
    ):  # more of the small copies hits than the model grants
        e = e.replace(l2_bytes_per_s=MOST_L2_OVER_STREAM * e.stream_bytes_per_s)
        e = fit(e, prior, [field("stream_bytes_per_s"), field("kernel_start_s")], of("copy"))
    e = fit(e, prior, [field("eager_share", high=1.0)], of("elementwise"))
    dtypes = sorted({p.case.arguments["dtype"] for p in of("gemm")})
    shape = [
        field("gemm_start_s"),
        field("wave_start_s"),
        field("feed_cost"),
        field("unaligned_share", high=1.0),
    ]
    e = fit(e, prior, [*(matmul_rate(dtype) for dtype in dtypes), *shape], of("gemm"))
    for kernel in sorted({p.case.arguments["kernel"] for p in of("attention")}):
        e = fit(
            e,
            prior,
            [curve(kernel, "share"), curve(kernel, "other")],
            of("attention", kernel=kernel, backward=False),
        )
        backward = [curve(kernel, "backward_share"), curve(kernel, "backward_other")]
        e = fit(e, prior, backward, of("attention", kernel=kernel, backward=True))
    e = fit(
        e, prior, [field("decode_instructions_per_s")], of("dequantize", provider="bitsandbytes")
    )
    host = [p for p in of("host copy")]
    return fit(
        e,
        prior,
        [field("pinned_bytes_per_s"), field("pageable_bytes_per_s"), field("host_copy_start_s")],
        host,
    )


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
        elif name != "gpu":
            found[name] = value
    return found
