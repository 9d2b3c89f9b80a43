"""Run the planned operations within an allowance: each a point with its median and spread, or the
reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.op_cases import OpCase
from napkinmath_profiler.calibration.timing import (
    Timing,
    throttling,
    time_calls,
)
from napkinmath_profiler.measuring.exhaustion import exhaustion_as_one_error

# Input sets together leave the cache behind: the L2 of an H200 is 50 MiB.
ROTATED_BYTES = {"cuda": 128 << 20, "cpu": 32 << 20}
MOST_SETS = 8
SECONDS_A_CASE = 0.25
SUSTAINED_S = 1.5  # long enough for a power limit to bite
SUSTAINED = ("gemm",)


@dataclass(frozen=True, slots=True)
class OpPoint:
    """A measured operation; `reason` says why there is no timing."""

    case: OpCase
    timing: Timing | None
    reason: str = ""
    scattered: float = 0.0  # by how much its repetitions did, where that is why there is no timing

    @property
    def flops_per_s(self) -> float:
        """Attained; 0 where the operation computes nothing or was not measured."""
        return self.case.flops / self.timing.median_s if self.timing else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Attained, read and written bytes together."""
        return self.case.moved / self.timing.median_s if self.timing else 0.0

    def as_row(self) -> dict[str, Any]:
        """The point as JSON."""
        row: dict[str, Any] = {"op": self.case.op, **self.case.arguments}
        if self.timing is None:
            return {**row, "reason": self.reason}
        row |= {
            "median_s": self.timing.median_s,
            "p10_s": self.timing.low_s,
            "p90_s": self.timing.high_s,
            "samples": len(self.timing.samples),
        }
        if self.case.flops:
            row |= {"flops": self.case.flops, "flops_per_s": self.flops_per_s}
        if self.case.moved:
            row |= {"moved": self.case.moved, "bytes_per_s": self.bytes_per_s}
        return row


def measure_ops(
    cases: Iterable[OpCase],
    device: Device,
    allowed: Allowance,
    notes: list[str],
    advance: Callable[[str], object] = lambda _: None,
) -> list[OpPoint]:
    """Every case as a point; what does not fit the allowance or the budget, or fails, says so and
    costs the others nothing."""
    found: list[OpPoint] = []
    sustained = False
    for case in cases:
        advance(f"{case.op} {case.label}")
        seconds = SECONDS_A_CASE
        if case.op in SUSTAINED and not sustained:
            sustained = True
            seconds = min(SUSTAINED_S, max(SECONDS_A_CASE, allowed.seconds_left / 10))
        point = measure_op(case, device, allowed, seconds)
        if point.timing is not None and seconds > SECONDS_A_CASE:
            said = throttling(point.timing)
            notes += [f"{case.op} {case.label} {said}"] if said is not None else []
        found.append(point)
    return found


def measure_op(
    case: OpCase, device: Device, allowed: Allowance, seconds: float = SECONDS_A_CASE
) -> OpPoint:
    """One case; frees everything it held, whatever happened."""
    if case.needs_cuda and not device.is_cuda:
        return OpPoint(case, None, "needs a GPU")
    if allowed.seconds_left < seconds / 2:
        return OpPoint(case, None, "the budget was spent")
    if case.held > allowed.nbytes:
        return OpPoint(case, None, f"needs {case.held >> 20} MiB, more than the allowance")
    try:
        with exhaustion_as_one_error():
            calls = _rotated(case, device, allowed)
            most = min(seconds, max(0.02, allowed.seconds_left))
            return steady_point(case, time_calls(calls, device, seconds=most))
    except torch.OutOfMemoryError:
        return OpPoint(case, None, "out of memory")
    except Exception as error:  # an operation that this build lacks must not cost the others
        first = next(iter(str(error).splitlines()), "")
        return OpPoint(case, None, f"{type(error).__name__}: {first}"[:160])
    finally:
        device.release()


def steady_point(case: OpCase, timing: Timing) -> OpPoint:
    """A point of a timing; without it where the repetitions scatter: such a time is nobody's."""
    if not timing.scatters:
        return OpPoint(case, timing)
    return OpPoint(case, None, "its repetitions scattered too much", timing.spread)


def _rotated(case: OpCase, device: Device, allowed: Allowance) -> list[Callable[[], object]]:
    """As many sets of inputs as leave the cache behind, within the allowance."""
    wanted = -(-ROTATED_BYTES[device.torch_device.type] // max(1, case.held))
    count = max(1, min(MOST_SETS, wanted, allowed.nbytes // max(1, case.held)))
    return [case.make(device) for _ in range(count)]
