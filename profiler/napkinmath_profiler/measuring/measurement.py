"""What measuring a training step found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline

from napkinmath_profiler.measuring.measured_loop import PhaseSummary, StepFigures, TimeSpread
from napkinmath_profiler.tracing.storage_events import StorageRecord
from napkinmath_profiler.tracing.trace_result import TraceResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Peak bytes of the measured steps.

    ``requested`` is what the program asked for, each tensor rounded to 512 B, as the timeline has
    it. ``allocated`` and ``reserved`` are the allocator's, less what was there before the model was
    built; on a CPU they are replayed from the timeline. ``device_used`` is the whole GPU's at its
    highest reading, other processes included; None on a CPU.
    """

    requested: int
    allocated: int
    reserved: int
    device_used: int | None = None
    before_allocated: int = 0
    before_device_used: int | None = None
    num_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryReport:
    """An out-of-memory error in the middle: where it happened and what was known by then."""

    message: str
    stage: str
    """building, attributing or timing"""
    phase: str
    step: int
    figures: dict[str, int] = field(default_factory=dict[str, int])
    held_by_role: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of parameters, gradients and optimizer states that were there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One model's training steps as they ran.

    ``steps`` are all steps of the timing pass, warm-up included; ``phases`` and ``step`` are over
    the timed ones.
    """

    num_layers: int
    total_layers: int
    device: str
    tokens: int
    """Tokens of one optimizer step."""
    timeline: Timeline | None
    result: TraceResult | None
    memory: MeasuredMemory | None
    steps: tuple[StepFigures, ...] = ()
    phases: dict[Phase, PhaseSummary] = field(default_factory=dict[Phase, PhaseSummary])
    step: TimeSpread | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    failure: OutOfMemoryReport | None = None
    snapshot: dict[str, Any] | None = None
    """PyTorch's own snapshot of the attributed steps, on a GPU."""
    present: dict[int, StorageRecord] = field(default_factory=dict[int, StorageRecord])
    """By address, what was there before those steps and has no event in the snapshot."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second at the median step."""
        return (
            None
            if self.step is None or not self.step.median_s
            else self.tokens / self.step.median_s
        )
