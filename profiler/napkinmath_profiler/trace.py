"""``trace_config``: one traced training step of the real libraries' code, from a config."""

from __future__ import annotations

import gc
import importlib.metadata
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.attribution import attribute
from napkinmath_profiler.tracing.cuda_choices import AppliedChoices, cuda_choices
from napkinmath_profiler.tracing.kernel_workspaces import WORKSPACES
from napkinmath_profiler.tracing.meta_model import (
    AdapterOptions,
    QuantizationOptions,
    TrainMethod,
    add_adapters,
    build_model,
    config_from,
    example_inputs,
    prepare_for_kbit,
    quantization_constants,
    quantize_4bit,
)
from napkinmath_profiler.tracing.module_paths import ModulePaths
from napkinmath_profiler.tracing.op_handlers import OpHandlers
from napkinmath_profiler.tracing.storage_events import StorageRole
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import OPTIMIZERS, LoopOptions, StepRunner

STAMPED_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What to trace; the names follow the command's flags."""

    method: TrainMethod = TrainMethod.FULL
    micro_batch_size: int = 1
    sequence_length: int = 2048
    dtype: str = "bf16"
    checkpointing: bool = False
    use_reentrant: bool = False
    attention: str | None = None
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    compute_capability: tuple[int, int] = (8, 0)
    kernel_workspaces: bool = True
    attention_mask: bool = False
    optimizer: str | None = "adamw"
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    quantization: QuantizationOptions = field(default_factory=QuantizationOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)
    training: bool = True


def trace_config(config: Any, *, num_layers: int | None = None, **options: Any) -> TraceResult:
    """Build ``config``'s model on meta and trace its training steps.

    ``config``: a mapping with ``model_type``, a path, or a transformers config. ``options`` are ``TraceOptions`` fields.
    """
    chosen = TraceOptions(**options)
    config = config_from(config)
    if num_layers is not None:
        config.get_text_config().num_hidden_layers = num_layers
    model = _model(config, chosen)
    inputs = example_inputs(
        model,
        config,
        micro_batch_size=chosen.micro_batch_size,
        sequence_length=chosen.sequence_length,
        attention_mask=chosen.attention_mask,
    )
    return _trace(model, inputs, chosen)


def _model(config: Any, options: TraceOptions) -> nn.Module:
    model = build_model(config, dtype=options.dtype, attn_implementation=options.attention)
    if options.method is TrainMethod.QLORA:
        model = quantize_4bit(model, compute_dtype=options.dtype, options=options.quantization)
        if options.quantization.kbit_preparation:
            model = prepare_for_kbit(model, checkpointing=options.checkpointing, use_reentrant=options.use_reentrant)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": options.use_reentrant})
        if options.method is not TrainMethod.FULL and options.use_reentrant:
            model.enable_input_require_grads()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if options.method is not TrainMethod.FULL:
        model = add_adapters(model, options.adapters)
    return model.train(options.training)


def _mark_persistent(model: nn.Module, inputs: dict[str, Any], tracker: StorageTracker) -> None:
    adapters = {id(p) for n, p in model.named_parameters() if "lora_" in n}
    tracker.mark_all(quantization_constants(model), StorageRole.QUANTIZATION_CONSTANTS)
    for name, parameter in model.named_parameters():
        tracker.mark(parameter, StorageRole.ADAPTER_WEIGHTS if id(parameter) in adapters else StorageRole.WEIGHTS, name)
    tracker.mark_all(model.named_buffers(), StorageRole.BUFFERS)
    tracker.mark_all(((n, t) for n, t in inputs.items() if isinstance(t, torch.Tensor)), StorageRole.INPUTS)


def _trace(model: nn.Module, inputs: dict[str, Any], options: TraceOptions) -> TraceResult:
    applied, paths = AppliedChoices(), ModulePaths()
    paths.name_modules(model)
    tracker = StorageTracker("meta", paths, OpHandlers(applied.counts).table(), WORKSPACES if options.kernel_workspaces else None)
    optimizer = OPTIMIZERS[options.optimizer]([p for p in model.parameters() if p.requires_grad]) if options.optimizer else None
    head = _output_head(model)
    started = time.perf_counter()
    _mark_persistent(model, inputs, tracker)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_collector_off())
        stack.enter_context(cuda_choices(options.attention_backend, options.compute_capability, applied))
        stack.enter_context(paths.followed())
        runner = StepRunner(model, optimizer, tracker, options.loop)
        stack.enter_context(tracker)
        runner.run(inputs, head)
    seconds = time.perf_counter() - started
    tracker.stop()
    applied.counts["kernel workspaces"] += tracker.num_workspaces
    head_path = next((path for path, module in model.named_modules() if module is head), None)
    attribute(tracker.records, head_path)
    return TraceResult(
        records=tracker.records,
        events=tracker.events,
        num_ops=tracker.num_ops,
        seconds=seconds,
        choices={name: count for name, count in applied.counts.items() if count},
        attention=dict(applied.attention),
        marks=runner.marks,
        versions=installed_versions(),
    )


class _collector_off:
    """The cyclic collector's moments are not the program's: collect before, keep it off inside."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


def _output_head(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def installed_versions() -> dict[str, str]:
    """Versions of the libraries whose code the trace ran."""
    versions: dict[str, str] = {}
    for name in STAMPED_LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
