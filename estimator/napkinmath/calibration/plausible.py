"""contradictions: measured speeds that the GPU's datasheet rules out.

A busy machine, a clock that is turned down or a file that was edited gives such speeds. Nothing is
saved with them, and no file that has them is used.
"""

from __future__ import annotations

from napkinmath.timing.efficiency import default_efficiency

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.config.hardware import Gpu
    from napkinmath.timing.efficiency import Efficiency

MOST_RATIO = 3.0
"""Measured over implied speeds, and the other way round. The published ones lie within 0.4 and 1.3
of what a datasheet implies (docs/accuracy.md)."""


def contradictions(speed: Efficiency, gpu: Gpu) -> tuple[str, ...]:
    """Which of the speeds are more than MOST_RATIO off what the GPU's datasheet implies, in words.

    A machine that describes itself has no datasheet. A slower link to the host is no contradiction:
    the slot decides.
    """
    if gpu.architecture == "unknown":
        return ()
    return tuple(
        f"{name} run at {measured / unit:.3g} {unit_name}, {_times(measured, implied)} the"
        f" {implied / unit:.3g} that the datasheet of {gpu.name} implies"
        for name, measured, implied, unit, unit_name in _compared(speed, gpu)
        if not implied / MOST_RATIO <= measured <= implied * MOST_RATIO
    )


def _compared(speed: Efficiency, gpu: Gpu) -> Iterator[tuple[str, float, float, float, str]]:
    """(what, measured, implied, unit, its name) of every rate that a datasheet gives."""
    base = default_efficiency(gpu)
    implied = dict(base.matmul_flops_per_s)
    for dtype, rate in speed.matmul_flops_per_s:
        if dtype in implied:
            yield f"{dtype} products", rate, implied[dtype], 1e12, "TFLOP/s"
    yield "copies", speed.stream_bytes_per_s, base.stream_bytes_per_s, 1e9, "GB/s"
    link = base.pinned_bytes_per_s
    yield "copies to the host", max(speed.pinned_bytes_per_s, link), link, 1e9, "GB/s"


def _times(measured: float, implied: float) -> str:
    """'7.5 times', or '0.13 of'."""
    ratio = measured / implied
    return f"{ratio:.2g} times" if ratio >= 1 else f"{ratio:.2g} of"
