"""Trace training steps of real library code on storage-less tensors: from a config, or a live module and its loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.meta_model import (
    AdapterOptions,
    QuantizationOptions,
    TrainMethod,
    add_adapters,
    build_model,
    config_from,
    example_inputs,
    prepare_for_kbit,
    quantize_4bit,
)
from napkinmath_profiler.tracing.observation import CudaSettings, observe
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import OPTIMIZERS, LoopOptions, TrainingLoop


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

    @property
    def settings(self) -> CudaSettings:
        """Which GPU's choices are made."""
        return CudaSettings(
            attention_backend=self.attention_backend,
            compute_capability=self.compute_capability,
            kernel_workspaces=self.kernel_workspaces,
        )


def trace_config(config: Any, *, num_layers: int | None = None, **options: Any) -> TraceResult:
    """Build ``config``'s model on meta and trace its training steps.

    ``config``: a mapping with ``model_type``, a path, or a transformers config. ``options`` are ``TraceOptions`` fields.
    """
    chosen = TraceOptions(**options)
    config = config_from(config)
    if num_layers is not None:
        config.get_text_config().num_hidden_layers = num_layers
    model = prepared_model(config, chosen)
    inputs = example_inputs(
        model,
        config,
        micro_batch_size=chosen.micro_batch_size,
        sequence_length=chosen.sequence_length,
        attention_mask=chosen.attention_mask,
    )
    optimizer = OPTIMIZERS[chosen.optimizer]([p for p in model.parameters() if p.requires_grad]) if chosen.optimizer else None
    return observe(model, TrainingLoop(model, optimizer, inputs, chosen.loop).run, inputs=inputs, settings=chosen.settings)


def prepared_model(config: Any, options: TraceOptions) -> nn.Module:
    """The model as the user's libraries set it up for training: quantized, checkpointed, with adapters."""
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
