"""The slowest of many GPUs: ranks that wait for each other in every step run at its pace."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.timing.schedule import PhaseTime

# Standard deviation of one kind of GPU's speed under load: the same product's time varies by about
# 8% over the GPUs of a cluster, power and temperature limits being each chip's own (Sinha et al.,
# SC 2022, "Not All GPUs Are Created Equal"); taken as four standard deviations.
_DEVIATION = 0.02


def slowest_factor(ranks: int) -> float:
    """The slowest rank's time over the mean: the expected largest of so many normal deviations,
    sqrt(2 ln n) of them."""
    from math import log

    return 1.0 + _DEVIATION * (2 * log(ranks)) ** 0.5 if ranks > 1 else 1.0


def at_the_slowest_pace(phases: tuple[PhaseTime, ...], ranks: int) -> tuple[PhaseTime, ...]:
    """The phases as the slowest rank takes them; the hosts are not limited by power."""
    factor = slowest_factor(ranks)
    return tuple(phase.replace(device_s=phase.device_s * factor) for phase in phases)
