"""What a measurement may take: a share of the memory that is free, and a number of seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from napkinmath.base.errors import InputError
from napkinmath.base.units import format_bytes

from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.measuring.device_memory import hold_to_bytes

LEAST_BYTES = 256 << 20
BUSY_SHARE = 0.1


@dataclass(slots=True)
class Allowance:
    """Bytes that may be held at once, and the moment to stop."""

    nbytes: int
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Until the budget is spent; negative after."""
        return self.started + self.seconds - time.monotonic()

    def part(self, share: float) -> Allowance:
        """A share of the seconds that are left, with the same memory."""
        return Allowance(self.nbytes, max(0.0, self.seconds_left) * share)


def allowance(
    device: Device, *, share: float, seconds: float, notes: list[str], at_most: int | None = None
) -> Allowance:
    """A share of what is free on the device; says so where other processes hold some of it, and
    refuses where too little is left."""
    free, total = device.memory()
    nbytes = int(free * share)
    if at_most is not None:
        nbytes = min(nbytes, at_most)
    if nbytes < LEAST_BYTES:
        raise InputError(
            f"{device.name} has {format_bytes(free)} of {format_bytes(total)} free and a share of"
            f" {share:g} is {format_bytes(nbytes)}, less than the {format_bytes(LEAST_BYTES)} a"
            " measurement needs; stop what else uses it, or raise --share"
        )
    if device.is_cuda and total - free > BUSY_SHARE * total:
        notes.append(
            f"other programs held {format_bytes(total - free)} of {format_bytes(total)}: speeds may"
            " be lower than those of an idle GPU"
        )
    return Allowance(nbytes, seconds)


def hold_to(device: Device, allowed: Allowance) -> None:
    """Make torch itself refuse more than the allowance on a GPU, so that a mistake of ours cannot
    hurt another process."""
    if device.is_cuda:
        hold_to_bytes(device.torch_device, allowed.nbytes)
