"""``measure_step``: build a real model, run whole training steps, and give back what they did to
memory and how long they took."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.memory.replay import replay
from torch import nn

from napkinmath_profiler.measuring.device_memory import (
    CpuMemory,
    CudaMemory,
    DeviceMemory,
    MemoryFigures,
)
from napkinmath_profiler.measuring.device_names import device_named
from napkinmath_profiler.measuring.environment import (
    busy_notes,
    describe_environment,
    disturbance_notes,
    slice_notes,
    smi_facts,
    spread_notes,
    throttling_notes,
)
from napkinmath_profiler.measuring.exhaustion import exhaustion_as_one_error
from napkinmath_profiler.measuring.garbage import quick_collections
from napkinmath_profiler.measuring.held import held_by_role
from napkinmath_profiler.measuring.history_pass import HistoryPass
from napkinmath_profiler.measuring.measured_loop import (
    MeasuredLoop,
    StepFigures,
    step_spread,
    summarize,
)
from napkinmath_profiler.measuring.measurement import MeasuredMemory, Measurement, OutOfMemoryReport
from napkinmath_profiler.measuring.partial import num_layers_of, with_kept
from napkinmath_profiler.measuring.real_model import optimizer_of, real_inputs, real_model
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.storage_events import StorageRecord
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from napkinmath_profiler.tracing.training_step import LoopOptions

DEFAULT_DEVICE = "cuda:0"
NUM_ATTRIBUTED_STEPS = 2  # the first step makes the optimizer's states, the second finds them
MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How to measure; what is measured is said by ``TraceOptions``.

    ``num_layers`` None is all of them; ``kept`` names the layers instead. ``attribute`` records
    every allocation of two steps with who made it, which slows those steps down, and then runs
    ``num_warmup_steps`` and ``num_steps`` undisturbed ones for the clock; ``num_steps`` 0 leaves
    them out. ``memory_share`` is how much of the GPU's free memory may be taken.
    """

    device: str = DEFAULT_DEVICE
    num_layers: int | None = None
    kept: tuple[int, ...] | None = None
    num_steps: int = 5
    num_warmup_steps: int = 2
    attribute: bool = True
    stacks: bool = False
    memory_share: float = 0.95
    stand_in: CpuMemory | None = None
    """On a CPU, run what a GPU would be measured by over these books instead of the trace's
    tracker."""


def measure_step(
    config: Any, options: TraceOptions, how: MeasureOptions | None = None
) -> Measurement:
    """Measure ``config``'s training step (a mapping, a path, a transformers config) as ``options``
    describe it.

    Out of memory is no error: the measurement says where it happened and what was learned.
    Everything is freed before returning. Raises InputError without the device asked for.
    """
    return _Run(config, options, how or MeasureOptions()).run()


def measure_layers(
    config: Any,
    options: TraceOptions,
    how: MeasureOptions | None = None,
    *,
    counts: Sequence[int] = (1, 2, 3),
) -> list[Measurement]:
    """The same step with each number of layers; stops after the first that runs out of memory."""
    found: list[Measurement] = []
    for count in counts:
        found.append(
            measure_step(
                config, options, dataclasses.replace(how or MeasureOptions(), num_layers=count)
            )
        )
        if found[-1].failure is not None:
            break
    return found


class _Run:
    """One measurement, stage by stage; whatever stage runs out of memory, what the earlier ones
    found is kept."""

    def __init__(self, config: Any, options: TraceOptions, how: MeasureOptions) -> None:
        self._how = how
        self._device = device_named(how.device)
        config = config_from(config)
        self._total = num_layers_of(config)
        wanted = range(self._total if how.num_layers is None else how.num_layers)
        kept = how.kept if how.kept is not None else tuple(wanted)
        self._config, self._num_layers = with_kept(config, kept), len(kept)
        loop = dataclasses.replace(options.loop, device_type=self._device.type)
        self._options = dataclasses.replace(options, loop=loop)
        self._memory: DeviceMemory | None = (
            CudaMemory(self._device) if self._device.type == "cuda" else how.stand_in
        )
        self._snapshot: dict[str, Any] | None = None
        self._present: dict[int, StorageRecord] = {}
        self._stage, self._loop = "building", None
        self._stack = ExitStack()
        self._notes: list[str] = []
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._result: TraceResult | None = None
        self._steps: list[StepFigures] = []
        self._before: MemoryFigures | None = None
        self._device_used: int | None = None
        self._throttling: list[str] = []
        self._failure: OutOfMemoryReport | None = None

    def run(self) -> Measurement:
        # Events, caches and workspaces are those of the current device: of several GPUs the one
        # measured has to be it.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if self._device.type == "cuda":
                self._release()
            # what is here already stays out of the collections that free a model
            with quick_collections():
                try:
                    with self._memory or nullcontext():
                        return self._run()
                finally:
                    if self._memory is not None:
                        self._memory.unlimit()

    def _run(self) -> Measurement:
        if self._memory is not None:
            self._memory.limit(self._how.memory_share)
            self._memory.reset_peaks()
            self._before = self._memory.figures()
        try:
            with exhaustion_as_one_error():
                self._stages()
        except torch.OutOfMemoryError as error:
            self._failure = self._report(error)
        finally:
            self._forget()
        return self._measurement()

    def _stages(self) -> None:
        self._build()
        if self._how.attribute and self._options.loop.compile:
            self._notes.append(
                "a compiled step was timed, not attributed: hooks would break its graph"
            )
        elif self._how.attribute:
            self._stage = "attributing"
            self._attribute()
        if self._how.num_steps:
            self._stage = "timing"
            self._time()

    def _build(self) -> None:
        device = str(self._device)
        self._model = self._stack.enter_context(real_model(self._config, self._options, device))
        self._optimizer = optimizer_of(self._model, self._options)
        self._inputs = real_inputs(self._model, self._config, self._options, device)

    def _new_loop(self, memory: DeviceMemory | None) -> MeasuredLoop:
        assert self._model is not None
        options: LoopOptions = self._options.loop
        self._loop = MeasuredLoop(
            self._model, self._optimizer, self._inputs, options, device=self._device, memory=memory
        )
        return self._loop

    def _attribute(self) -> None:
        assert self._model is not None
        loop = self._new_loop(None)
        if self._memory is None:
            self._result = observe(
                self._model,
                lambda: _discard(loop.timed_steps(NUM_ATTRIBUTED_STEPS)),
                inputs=self._inputs,
                settings=None,
                device_type="cpu",
            )
        else:
            self._attribute_history(self._model, loop, self._memory)
        self._start_over()

    def _attribute_history(
        self, model: nn.Module, loop: MeasuredLoop, memory: DeviceMemory
    ) -> None:
        foreign = self._before.allocated if self._before is not None else 0
        recording = HistoryPass(
            model, loop, self._inputs, self._optimizer, memory, foreign_bytes=foreign
        )
        try:
            recording.run(NUM_ATTRIBUTED_STEPS, stacks=self._how.stacks)
        finally:
            self._result = recording.result
            self._snapshot = memory.recorded
            self._present = recording.present_in(self._result)

    def _start_over(self) -> None:
        """Take the attributed steps back: no gradients, no optimizer states, nothing cached."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
            self._optimizer.state.clear()
        self._release()

    def _time(self) -> None:
        loop = self._new_loop(self._memory)
        self._steps = loop.steps
        loop.timed_steps(self._how.num_warmup_steps + self._how.num_steps)
        if self._memory is not None:
            self._device_used = self._memory.figures().device_used
            self._throttling = throttling_notes(smi_facts(self._device))

    def _report(self, error: torch.OutOfMemoryError) -> OutOfMemoryReport:
        figures: dict[str, int] = {}
        if self._memory is not None:
            now = self._memory.figures()
            figures = {
                "allocated": now.allocated,
                "reserved": now.reserved,
                "device_used": now.device_used or 0,
                "device_total": now.device_total or 0,
            }
            self._device_used = now.device_used
        phase = self._loop.phase if self._loop is not None else None
        return OutOfMemoryReport(
            message=" ".join(str(error).split()),
            stage=self._stage,
            phase=phase.value if phase is not None else "",
            step=len(self._loop.steps) if self._loop is not None else 0,
            figures=figures,
            held_by_role=held_by_role(self._model, self._optimizer),
        )

    def _forget(self) -> None:
        self._stack.close()
        self._model = self._optimizer = self._loop = None
        self._inputs = {}
        self._release()

    def _release(self) -> None:
        gc.collect()
        if self._memory is not None:
            self._memory.release()

    def _measurement(self) -> Measurement:
        steps, timed = self._steps, self._steps[self._how.num_warmup_steps :]
        memory = self._memory_of(steps)
        if memory is not None:
            self._notes += disturbance_notes(memory.requested, memory.allocated)
        timeline = timeline_of(self._result, origin=MEASURED) if self._result is not None else None
        step = step_spread(timed) if timed else None
        environment = describe_environment(self._device)
        return Measurement(
            num_layers=self._num_layers,
            total_layers=self._total,
            device=environment["device"],
            tokens=self._options.micro_batch_size
            * self._options.sequence_length
            * self._options.loop.gradient_accumulation_steps,
            timeline=timeline,
            result=self._result,
            memory=memory,
            steps=tuple(steps),
            phases=summarize(steps, timed) if timed else {},
            step=step,
            environment=environment,
            notes=(
                *self._notes,
                *slice_notes(environment["device"]),
                *busy_notes(self._before),
                *spread_notes(step),
                *self._throttling,
            ),
            failure=self._failure,
            snapshot=self._snapshot,
            present=self._present,
        )

    def _memory_of(self, steps: list[StepFigures]) -> MeasuredMemory | None:
        timeline = timeline_of(self._result) if self._result is not None else None
        requested = timeline.peak().nbytes if timeline is not None else 0
        if self._memory is None:
            if timeline is None:
                return None
            books = replay(timeline)
            return MeasuredMemory(
                requested=requested, allocated=books.peak_allocated, reserved=books.peak_reserved
            )
        assert self._before is not None
        peaks = [figures for step in steps for figures in step.values()]
        if not peaks:
            return None
        return MeasuredMemory(
            requested=requested,
            allocated=max(p.peak_allocated for p in peaks) - self._before.allocated,
            # A segment that was there for something else also serves the step: only what was booked
            # in it is not the step's.
            reserved=max(p.peak_reserved for p in peaks) - self._before.allocated,
            device_used=self._device_used,
            before_allocated=self._before.allocated,
            before_device_used=self._before.device_used,
            num_retries=self._memory.figures().num_retries - self._before.num_retries,
        )


def _discard(_: object) -> None:
    return None
