"""Seconds of one call on a device: samples over rotated inputs, with their spread and whether they
grew while we looked.

CUDA events on a GPU, the wall clock on a CPU. Short calls on a GPU are queued behind each other, so
that a sample is long against the clock's resolution and the host's part is hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from napkinmath_profiler.calibration.devices import Device

FEWEST_SAMPLES, MOST_SAMPLES = 5, 60
SAMPLE_S = 2e-3
MOST_QUEUED = 200
# A clock that is turned down shows as samples that grow while the work stays the same.
# A GPU at a steady clock repeats a large product within a few percent; boosting and thermal limits
# move it by 10% and more.
GROWTH_NOTICED = 1.07
MOST_SPREAD = 0.20  # of repetitions; nothing that scatters more is kept


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one call, in the order taken."""

    samples: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Of all samples."""
        return statistics.median(self.samples)

    @property
    def low_s(self) -> float:
        """10th percentile."""
        return sorted(self.samples)[len(self.samples) // 10]

    @property
    def high_s(self) -> float:
        """90th percentile."""
        return sorted(self.samples)[-1 - len(self.samples) // 10]

    @property
    def spread(self) -> float:
        """Width between the percentiles over the median."""
        return (self.high_s - self.low_s) / self.median_s

    @property
    def scatters(self) -> bool:
        """Whether the repetitions differ by more than a figure may be kept with."""
        return self.spread > MOST_SPREAD

    @property
    def growth(self) -> float:
        """Median of the last third over that of the first: above one where the clock went down."""
        third = max(1, len(self.samples) // 3)
        return statistics.median(self.samples[-third:]) / statistics.median(self.samples[:third])


def throttling(timing: Timing) -> str | None:
    """What the samples of a sustained call say about the clock; None where they are steady."""
    if len(timing.samples) < FEWEST_SAMPLES:
        return None
    if timing.growth > GROWTH_NOTICED:
        return (
            f"became {timing.growth - 1:.0%} slower while measured: the clock was turned down"
            " (power or heat), or another process came"
        )
    return None


def time_calls(
    calls: Sequence[Callable[[], object]],
    device: Device,
    *,
    seconds: float,
    most: int = MOST_SAMPLES,
) -> Timing:
    """Time ``calls`` in turn (one for each set of inputs) for about ``seconds``, after a warm-up on
    each."""
    for call in calls[:4]:
        call()
    device.synchronize()
    begin = time.perf_counter()
    calls[0]()
    device.synchronize()
    once = max(time.perf_counter() - begin, 1e-7)
    queued = max(1, min(MOST_QUEUED, int(SAMPLE_S / once)))
    count = max(FEWEST_SAMPLES, min(most, int(seconds / (once * queued))))
    sample = _event_sample if device.is_cuda else _wall_sample
    return Timing(
        tuple(sample(calls, number * queued, queued, device) / queued for number in range(count))
    )


def _event_sample(
    calls: Sequence[Callable[[], object]], first: int, queued: int, device: Device
) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for number in range(first, first + queued):
        calls[number % len(calls)]()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _wall_sample(
    calls: Sequence[Callable[[], object]], first: int, queued: int, device: Device
) -> float:
    begin = time.perf_counter()
    for number in range(first, first + queued):
        calls[number % len(calls)]()
    return time.perf_counter() - begin
