"""The traced training loop on a real device, with its phases timed and the allocator's peak read at
each of their ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.ir.ledger import Phase
from torch import nn

from napkinmath_profiler.measuring.device_memory import DeviceMemory
from napkinmath_profiler.tracing.step_phases import output_head
from napkinmath_profiler.tracing.storage_events import TracePhase
from napkinmath_profiler.tracing.traced_timeline import PHASES
from napkinmath_profiler.tracing.training_step import LoopOptions, TrainingLoop


@dataclass(frozen=True, slots=True)
class TimeSpread:
    """Median, 10th and 90th percentile of samples in seconds; the range of all where there are
    fewer than ten."""

    median_s: float
    low_s: float
    high_s: float
    num_samples: int

    @property
    def relative(self) -> float:
        """Width of the range over the median: what clock throttling and other processes make
        large."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s else 0.0


def spread_of(samples: Sequence[float]) -> TimeSpread:
    """The spread of at least one sample."""
    ordered = sorted(samples)
    return TimeSpread(
        statistics.median(ordered),
        ordered[len(ordered) // 10],
        ordered[-1 - len(ordered) // 10],
        len(ordered),
    )


@dataclass(slots=True)
class PhaseFigures:
    """One phase of one step: seconds, and the peaks of allocated and reserved bytes in it (0 where
    they were not read)."""

    seconds: float = 0.0
    peak_allocated: int = 0
    peak_reserved: int = 0


StepFigures = dict[Phase, PhaseFigures]


class StopWatch:
    """Stamps at phase boundaries: CUDA events, which cost no synchronization, or the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def stamp(self) -> Any:
        """A moment in the device's work."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one stamp to the next; both must have been reached."""
        return first.elapsed_time(second) / 1e3 if self._is_cuda else second - first


@dataclass(slots=True)
class _Mark:
    phase: TracePhase | None
    stamp: Any
    peak_allocated: int
    peak_reserved: int


class MeasuredLoop(TrainingLoop):
    """``TrainingLoop`` that knows how long each phase of each step took.

    ``listeners`` are called with every phase as it begins. What follows the output head inside a
    forward is the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        inputs: Mapping[str, Any],
        options: LoopOptions,
        *,
        device: torch.device,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(model, optimizer, inputs, options)
        self.listeners: list[Callable[[TracePhase], None]] = []
        self.steps: list[StepFigures] = []
        self._watch, self._memory, self._device = StopWatch(device), memory, device
        self.phase: TracePhase | None = None
        self._marks: list[_Mark] = []
        self._forward_call: Callable[..., Any] | None = None

    def _compiled(self) -> Callable[..., Any]:
        return torch.compile(self._model)

    def enter(self, phase: TracePhase) -> None:
        """A phase begins: stamp, read and reset the allocator's peaks, tell the listeners."""
        self._mark(phase)
        for listener in self.listeners:
            listener(phase)

    def _mark(self, phase: TracePhase | None) -> None:
        allocated = reserved = 0
        if self._memory is not None:
            allocated, reserved = self._memory.peaks()
            self._memory.reset_peaks()
        self._marks.append(_Mark(phase, self._watch.stamp(), allocated, reserved))
        self.phase = phase

    def timed_steps(self, count: int) -> list[StepFigures]:
        """Run ``count`` steps; the first call compiles what is to be compiled."""
        if self._forward_call is None:
            self._forward_call = self.begin()
        head = output_head(self._model)
        hook = None if head is None else head.register_forward_hook(lambda *_: self._head_done())
        first = len(self.steps)
        try:
            for _ in range(count):
                self._marks = []
                if self._memory is not None:
                    self._memory.reset_peaks()
                self.one_step(self._forward_call)
                self._mark(None)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self.steps.append(self._figures())
        finally:
            if hook is not None:
                hook.remove()
        return self.steps[first:]

    def _head_done(self) -> None:
        if (
            self.phase is TracePhase.FORWARD
            and torch._C._current_graph_task_id() == -1
            and not torch.compiler.is_compiling()
        ):
            self.enter(TracePhase.LOSS)

    def _figures(self) -> StepFigures:
        step: StepFigures = {}
        for mark, after in zip(self._marks, self._marks[1:], strict=False):
            assert mark.phase is not None
            figures = step.setdefault(PHASES[mark.phase], PhaseFigures())
            figures.seconds += self._watch.between(mark.stamp, after.stamp)
            figures.peak_allocated = max(figures.peak_allocated, after.peak_allocated)
            figures.peak_reserved = max(figures.peak_reserved, after.peak_reserved)
        return step


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase over the timed steps, and its highest peaks over all steps."""

    seconds: TimeSpread
    peak_allocated: int
    peak_reserved: int


def summarize(
    steps: Sequence[StepFigures], timed: Sequence[StepFigures]
) -> dict[Phase, PhaseSummary]:
    """Every phase that occurs, in the order of a step."""
    phases = [phase for phase in Phase if any(phase in step for step in timed)]
    return {
        phase: PhaseSummary(
            spread_of([step[phase].seconds for step in timed if phase in step]),
            max((step[phase].peak_allocated for step in steps if phase in step), default=0),
            max((step[phase].peak_reserved for step in steps if phase in step), default=0),
        )
        for phase in phases
    }


def step_spread(timed: Sequence[StepFigures]) -> TimeSpread:
    """Seconds of whole steps."""
    return spread_of([sum(figures.seconds for figures in step.values()) for step in timed])
