"""Run the short models of a plan at a few batches and lengths, within the allowance, and fit what
their phases take."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from napkinmath.calibration.measured_layers import (
    LayerMemory,
    LayerPoint,
    MeasuredLayers,
    layers_key,
)
from napkinmath.estimate import Estimate
from napkinmath.ir.ledger import Phase

from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.layer_fit import (
    NotAligned,
    fit_classes,
    fit_memory,
    fit_seconds,
)
from napkinmath_profiler.calibration.layer_plan import LayerPlan, plan_layers, short_config
from napkinmath_profiler.calibration.layer_stretches import CutRun, cut, merged
from napkinmath_profiler.calibration.op_classes import OpClasses, joined, profiled
from napkinmath_profiler.calibration.steady import likely_causes
from napkinmath_profiler.calibration.timing import Timing
from napkinmath_profiler.measuring.device_memory import CpuMemory
from napkinmath_profiler.measuring.exhaustion import exhaustion_as_one_error
from napkinmath_profiler.measuring.garbage import quick_collections
from napkinmath_profiler.measuring.measured_loop import StepFigures
from napkinmath_profiler.measuring.measurement import Measurement
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import config_from

NUM_STEPS, NUM_WARMUP_STEPS = 5, 2
# runs of different depth take turns, so that a clock that drifts does not look like a layer's cost
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How to run the layers; ``stand_in`` makes the books that a GPU's allocator would keep, for a
    CPU that stands in for one."""

    share: float = 0.5
    rounds: int = ROUNDS
    num_steps: int = NUM_STEPS
    stand_in: Callable[[], CpuMemory] | None = None


@dataclass(slots=True)
class _Point:
    """What the runs found at one batch and length."""

    micro_batch_size: int
    sequence_length: int
    cuts: dict[tuple[int, ...], CutRun] = field(default_factory=dict[tuple[int, ...], CutRun])
    rounds: dict[tuple[int, ...], list[list[StepFigures]]] = field(
        default_factory=dict[tuple[int, ...], list[list[StepFigures]]]
    )
    classes: dict[tuple[int, ...], OpClasses] = field(
        default_factory=dict[tuple[int, ...], OpClasses]
    )
    failed: bool = False

    @property
    def name(self) -> str:
        return f"batch {self.micro_batch_size} x {self.sequence_length}"


def points_for(batch: int, length: int) -> list[tuple[int, int]]:
    """The batch and length at hand first, then half as long, then half as long and twice as many:
    enough to see both."""
    half = max(16, length // 2)
    return list(dict.fromkeys([(batch, length), (batch, half), (2 * batch, half)]))


def measure_layers(
    config: Any,
    options: TraceOptions,
    model: Estimate,
    device: Device,
    allowed: Allowance,
    notes: list[str],
    *,
    how: LayerOptions | None = None,
    points: Sequence[tuple[int, int]] = (),
    advance: Callable[[str], object] = lambda _: None,
) -> MeasuredLayers | None:
    """Real layers of ``config`` as ``options`` train them, fitted; None where too little was
    learned, and ``notes`` say why.

    ``model`` is the same step as the estimator prices it: it names the measurement. Out of memory
    ends a point, not the others.
    """
    config, how = config_from(config), how or LayerOptions()
    plan = plan_layers(config, options)
    runner = _LayerRunner(config, options, plan, device, allowed, notes, how, advance)
    wanted = points or points_for(options.micro_batch_size, options.sequence_length)
    with quick_collections():
        found = [
            point for batch, length in wanted if (point := runner.point(batch, length)) is not None
        ]
    if not found:
        return None
    return MeasuredLayers(
        key=layers_key(model.spec, model.config, model.step.update.optimizer.name),
        model=model.spec.name,
        what=what_text(options, model),
        order=plan.order,
        points=tuple(found),
    )


def what_text(options: TraceOptions, model: Estimate) -> str:
    """The training step in a few words."""
    words = [options.method.value, model.config.precision.value]
    if options.checkpointing:
        words.append("checkpointing")
    return ", ".join(
        [*words, f"kernels {model.config.kernels.value}", model.step.update.optimizer.name]
    )


class _LayerRunner:
    def __init__(
        self,
        config: Any,
        options: TraceOptions,
        plan: LayerPlan,
        device: Device,
        allowed: Allowance,
        notes: list[str],
        how: LayerOptions,
        advance: Callable[[str], object],
    ) -> None:
        self._config, self._options, self._plan, self._device = config, options, plan, device
        self._allowed, self._notes, self._how, self._advance = allowed, notes, how, advance
        self._longest_s = 0.0
        self._has_classes = False

    def point(self, batch: int, length: int) -> LayerPoint | None:
        """One batch and length over every run; None where fewer than two runs could be made."""
        point = _Point(batch, length)
        self._record(point)
        for _ in range(self._how.rounds):
            self._time(point)
        if not self._has_classes:
            self._profile(point)
        if len(point.rounds) < min(2, len(self._plan.runs)):
            if not point.failed:
                self._notes.append(f"{point.name}: not measured, the budget was spent")
            return None
        return None if self._scatters(point) else self._fitted(point)

    def _record(self, point: _Point) -> None:
        """Memory of two steps of each run, event by event."""
        for run in self._plan.runs:
            measured = self._measure(point, run, attribute=True, num_steps=0)
            if measured is None:
                return
            if measured.result is not None and measured.failure is None:
                found = cut(measured.result, self._plan.stack_path)
                found.pieces = merged(found.pieces)
                point.cuts[run] = found

    def _time(self, point: _Point) -> None:
        """Undisturbed steps of each run."""
        for run in self._plan.runs:
            measured = self._measure(point, run, attribute=False, num_steps=self._how.num_steps)
            if measured is None:
                return
            if measured.failure is None:
                point.rounds.setdefault(run, []).append(list(measured.steps[NUM_WARMUP_STEPS:]))

    def _profile(self, point: _Point) -> None:
        """The kinds of operation, at the first point only: they are shares, and cost a run each."""
        for run in self._plan.runs:
            if point.failed or self._allowed.seconds_left < self._longest_s:
                return
            self._advance(f"{len(run)} layers, {point.name}, kinds of operation")
            try:
                point.classes[run] = self._classes(point, run)
            except torch.OutOfMemoryError:
                self._notes.append(
                    f"{point.name}: {len(run)} layers under the profiler ran out of memory; the"
                    " rest is kept"
                )
                return
            # of a profiler that may not look (CUPTI's privileges, another one at work): what was
            # timed is kept
            except Exception as reason:
                said = next(iter(str(reason).splitlines()), "")[:200]
                self._notes.append(
                    f"kinds of operation were not measured: {type(reason).__name__}: {said}; the"
                    " rest is kept"
                )
                break
        self._has_classes = True

    def _classes(self, point: _Point, run: tuple[int, ...]) -> OpClasses:
        try:
            with exhaustion_as_one_error():
                return joined(profiled(self._cut(run), self._options_at(point), self._device))
        finally:
            gc.collect()
            self._device.release()

    def _cut(self, run: tuple[int, ...]) -> Any:
        """The config with the layers of one run."""
        return short_config(self._config, run, len(self._plan.order))

    def _options_at(self, point: _Point) -> TraceOptions:
        return dataclasses.replace(
            self._options,
            micro_batch_size=point.micro_batch_size,
            sequence_length=point.sequence_length,
        )

    def _measure(
        self, point: _Point, run: tuple[int, ...], *, attribute: bool, num_steps: int
    ) -> Measurement | None:
        """One run; None where it did not fit the budget or the memory."""
        if point.failed or self._allowed.seconds_left < self._longest_s:
            return None
        layers = f"{len(run)} layer{'s' * (len(run) > 1)}"
        self._advance(f"{layers}, {point.name}, {'memory' if attribute else 'time'}")
        started = time.monotonic()
        measured, failure = None, "while it was built"
        try:
            how = self._how_to_measure(attribute=attribute, num_steps=num_steps)
            measured = measure_step(self._cut(run), self._options_at(point), how)
            stopped = measured.failure
            failure = f"in the {stopped.phase or stopped.stage}" if stopped is not None else ""
        except torch.OutOfMemoryError:
            pass
        self._longest_s = max(self._longest_s, time.monotonic() - started)
        if failure:
            point.failed = True
            self._notes.append(
                f"{point.name}: {len(run)} layers ran out of memory {failure}; what fewer layers"
                " showed is kept"
            )
        return None if failure else measured

    def _how_to_measure(self, *, attribute: bool, num_steps: int) -> MeasureOptions:
        stand_in = self._how.stand_in if attribute else None
        return MeasureOptions(
            device=str(self._device.torch_device),
            num_steps=num_steps,
            num_warmup_steps=NUM_WARMUP_STEPS,
            attribute=attribute,
            memory_share=self._how.share,
            stand_in=None if stand_in is None else stand_in(),
        )

    def _scatters(self, point: _Point) -> bool:
        """Whether the steps that count repeat too badly to be kept; the notes say so."""
        steps = [
            Timing(tuple(seconds_of(step) for step in settled(rounds, self._device)))
            for rounds in point.rounds.values()
        ]
        widest = max(steps, key=lambda timing: timing.spread)
        if not widest.scatters:
            return False
        seen = "; ".join(likely_causes(self._device)) or "the clock changed, or another process ran"
        self._notes.append(
            f"{point.name}: not kept, as its steps scattered by {widest.spread:.0%}: {seen}"
        )
        return True

    def _fitted(self, point: _Point) -> LayerPoint:
        seconds = fit_seconds(
            self._plan,
            {run: medians(settled(rounds, self._device)) for run, rounds in point.rounds.items()},
        )
        memory = self._fitted_memory(point)
        has_classes = len(point.classes) == len(self._plan.runs)
        return LayerPoint(
            micro_batch_size=point.micro_batch_size,
            sequence_length=point.sequence_length,
            seconds=tuple(seconds.items()),
            memory=memory,
            num_runs=len(point.rounds),
            classes=fit_classes(self._plan, point.classes) if has_classes else (),
        )

    def _fitted_memory(self, point: _Point) -> LayerMemory | None:
        try:
            memory, missed = fit_memory(self._plan, point.cuts)
        except NotAligned as reason:
            self._notes.append(f"{point.name}: no memory of the whole model, since {reason}")
            return None
        if missed:
            self._notes.append(
                f"{point.name}: bytes are not exactly linear in the layers; the fit misses a run by"
                f" {missed} bytes"
            )
        return memory


def settled(rounds: Sequence[Sequence[StepFigures]], device: Device) -> list[StepFigures]:
    """The steps that count: all of them on a GPU; on a CPU those of the quickest round, since other
    processes only ever add time there."""
    if device.is_cuda:
        return [step for steps in rounds for step in steps]
    return list(min(rounds, key=lambda steps: statistics.median(map(seconds_of, steps))))


def seconds_of(step: StepFigures) -> float:
    """A whole step."""
    return sum(figures.seconds for figures in step.values())


def medians(steps: Sequence[StepFigures]) -> dict[Phase, float]:
    """The median seconds of each phase."""
    phases = [phase for phase in Phase if any(phase in step for step in steps)]
    return {
        phase: statistics.median(step[phase].seconds for step in steps if phase in step)
        for phase in phases
    }
