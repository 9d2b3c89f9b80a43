"""``observe``: run a training loop under the tracker and give back what it did to memory."""

from __future__ import annotations

import gc
import importlib.metadata
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.attribution import attribute
from napkinmath_profiler.tracing.cuda_choices import AppliedChoices, cuda_choices
from napkinmath_profiler.tracing.kernel_workspaces import WORKSPACES
from napkinmath_profiler.tracing.module_paths import ModulePaths
from napkinmath_profiler.tracing.op_handlers import OpHandlers
from napkinmath_profiler.tracing.quantized_model import quantization_constants
from napkinmath_profiler.tracing.real_values import written_out
from napkinmath_profiler.tracing.step_phases import StepPhases, output_head
from napkinmath_profiler.tracing.storage_events import StorageRole
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.trace_errors import explained
from napkinmath_profiler.tracing.trace_result import TraceResult

STAMPED_LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "trl",
    "liger-kernel",
)
ADAPTER_MARKS = ("lora_", "ia3_", "prompt_encoder", "prefix_encoder", "modules_to_save")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSettings:
    """Which GPU's choices the meta device makes."""

    attention_backend: AttentionBackend = AttentionBackend.AUTO
    compute_capability: tuple[int, int] = (8, 0)
    kernel_workspaces: bool = True
    sums_in_place: bool = True


def observe(
    model: nn.Module,
    loop: Callable[[], None],
    *,
    inputs: Mapping[str, Any] | None = None,
    settings: CudaSettings | None,
    device_type: str = "meta",
) -> TraceResult:
    """Run ``loop``, which trains ``model``, and record every storage on ``device_type``.

    ``settings`` None observes what happens on the device as it is, with none of CUDA's choices.
    """
    applied, paths = AppliedChoices(), ModulePaths()
    paths.name_modules(model)
    tracker = _tracker(device_type, paths, applied, settings)
    started = time.perf_counter()
    mark_persistent(model, inputs or {}, tracker)
    with ExitStack() as stack:
        stack.enter_context(_undisturbed())
        if settings:
            stack.enter_context(
                cuda_choices(
                    settings.attention_backend,
                    settings.compute_capability,
                    applied,
                    tracker.mark_managed,
                )
            )
        stack.enter_context(paths.followed())
        stack.enter_context(StepPhases(model, tracker, paths).followed())
        _run(loop, tracker)
    applied.counts["kernel workspaces"] += tracker.num_workspaces
    applied.counts["gradient sums"] += tracker.num_sums_in_place
    head = output_head(model)
    paths_of_head = (path for path, module in model.named_modules() if module is head)
    attribute(tracker.records, next(paths_of_head, None))
    return TraceResult(
        records=tracker.records,
        events=tracker.events,
        num_ops=tracker.num_ops,
        seconds=time.perf_counter() - started,
        choices={name: count for name, count in applied.counts.items() if count},
        attention=dict(applied.attention),
        marks=tracker.marks,
        versions=installed_versions(),
        device_type=device_type,
    )


def _tracker(
    device_type: str, paths: ModulePaths, applied: AppliedChoices, settings: CudaSettings | None
) -> StorageTracker:
    handlers = None
    if device_type == "meta":
        handlers = OpHandlers(applied.counts).table(cuda=settings is not None)
    workspaces = WORKSPACES if settings and settings.kernel_workspaces else None
    tracker = StorageTracker(device_type, paths, handlers, workspaces)
    tracker.sums_in_place = settings is not None and settings.sums_in_place
    return tracker


def _run(loop: Callable[[], None], tracker: StorageTracker) -> None:
    """The loop under the tracker; an error on the meta device says which operation raised it."""
    StorageTracker.active = tracker
    with tracker, written_out():
        try:
            loop()
        except Exception as error:
            explanation = explained(error, tracker) if tracker.device_type == "meta" else None
            if explanation is None:
                raise
            raise explanation from error
        finally:
            StorageTracker.active = None
            tracker.stop()


def mark_persistent(model: nn.Module, inputs: Mapping[str, Any], tracker: StorageTracker) -> None:
    """Register what is there before the first step: quantization constants, parameters, buffers,
    the batch."""
    tracker.mark_all(quantization_constants(model), StorageRole.QUANTIZATION_CONSTANTS)
    for name, parameter in model.named_parameters():
        is_adapter = parameter.requires_grad and any(mark in name for mark in ADAPTER_MARKS)
        tracker.mark(
            parameter, StorageRole.ADAPTER_WEIGHTS if is_adapter else StorageRole.WEIGHTS, name
        )
        tracker.mark(parameter.grad, StorageRole.GRADIENTS, name)
    tracker.mark_all(model.named_buffers(), StorageRole.BUFFERS)
    tracker.mark_all(
        ((n, t) for n, t in inputs.items() if isinstance(t, torch.Tensor)), StorageRole.INPUTS
    )


@contextmanager
def _undisturbed() -> Generator[None]:
    """No cyclic collection, whose moments are not the program's, and no warnings about the meta
    device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if was_enabled:
            gc.enable()


def installed_versions() -> dict[str, str]:
    """Versions of the libraries whose code the trace ran."""
    versions: dict[str, str] = {}
    for name in STAMPED_LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
