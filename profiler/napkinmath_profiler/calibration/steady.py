"""What is not saved of a measurement: operations whose repetitions scatter, a measurement of which
too much scatters, and speeds that the GPU's datasheet rules out; with what on the machine is likely
wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence

from napkinmath.base.errors import InputError
from napkinmath.base.units import format_bytes
from napkinmath.calibration.plausible import contradictions
from napkinmath.config.hardware import Gpu
from napkinmath.timing.efficiency import Efficiency

from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.op_points import OpPoint
from napkinmath_profiler.measuring.environment import smi_facts, throttling_notes

MOST_UNSTEADY = 0.5  # of the operations that were timed
CEILINGS = ("copy", "gemm")  # without one of these nothing can be priced
BUSY_SHARE = 0.1  # of a GPU's memory, or of the processor's cores
LOW_CLOCK = 0.7  # of the highest


def refuse_doubtful(
    points: Sequence[OpPoint], speed: Efficiency, gpu: Gpu, device: Device, *, what: str
) -> None:
    """Raises InputError where a measurement is not to be kept: `what` says what is not written."""
    reasons = [*unsteady(points), *contradictions(speed, gpu)]
    if not reasons:
        return
    seen = "; ".join(likely_causes(device)) or (
        "nothing is to be seen of it now: look at other processes, clocks and throttling (nvidia-smi"
        " -q -d PERFORMANCE) while it measures"
    )
    raise InputError(
        f"{what}: {'; '.join(reasons[:3])}. {seen[:1].upper()}{seen[1:]}. Measure again on an idle"
        " machine"
    )


def unsteady(points: Sequence[OpPoint]) -> list[str]:
    """Why too much of a measurement scatters to be kept; empty where it does not."""
    timed = [point for point in points if point.timing is not None]
    left_out = [point for point in points if point.scattered]
    if not left_out:
        return []
    for op in CEILINGS:
        own = [point for point in left_out if point.case.op == op]
        if own and not any(point.case.op == op for point in timed):
            return [f"no {op} repeats its time: {_worst(own)}"]
    if len(left_out) > MOST_UNSTEADY * (len(left_out) + len(timed)):
        found = f"{len(left_out)} of {len(left_out) + len(timed)} operations scatter"
        return [f"{found}: {_worst(left_out)}"]
    return []


def _worst(points: Sequence[OpPoint]) -> str:
    worst = max(points, key=lambda point: point.scattered)
    return f"{worst.case.op} {worst.case.label} scattered by {worst.scattered:.0%}"


def likely_causes(device: Device) -> list[str]:
    """What can be seen on the machine that makes times wrong: other processes, clocks,
    throttling."""
    return [*(_of_gpu(device) if device.is_cuda else []), *_of_processor()]


def _of_gpu(device: Device) -> list[str]:
    free, total = device.memory()
    facts = smi_facts(device.torch_device)
    found = throttling_notes(facts)
    if total - free > BUSY_SHARE * total:
        found.append(f"other processes hold {format_bytes(total - free)} of the GPU")
    clock, highest = (_number(facts.get(key, "")) for key in ("clock", "maximum clock"))
    if clock and highest and clock < LOW_CLOCK * highest:
        found.append(f"its clock is {clock:.0f} of {highest:.0f} MHz")
    return found


def _of_processor() -> list[str]:
    cores = os.cpu_count() or 1
    try:
        busy = os.getloadavg()[0] - 1  # one of them is this process
    except (OSError, AttributeError):  # Windows
        return []
    if busy < max(BUSY_SHARE * cores, 0.5):
        return []
    return [f"other processes keep {busy:.1f} of the processor's {cores} cores busy"]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
