"""Trace training steps of real library code on storage-less tensors: from a config, or a live
module and its loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from napkinmath.config.train_config import TrainConfig
from napkinmath.ir.timeline import Timeline
from torch import nn

from napkinmath_profiler.tracing.extrapolation import NotRepeating, extrapolated
from napkinmath_profiler.tracing.kernel_patches import (
    forward_arguments,
    libraries_restored,
    patch_adapted,
    patch_library,
)
from napkinmath_profiler.tracing.layer_stacks import find_stacks, kept_layers, shorten
from napkinmath_profiler.tracing.live_module import (
    Builder,
    OptimizerBuilder,
    built,
    optimizer_over,
    run_step,
    takes_model,
)
from napkinmath_profiler.tracing.meta_model import (
    TrainMethod,
    add_adapters,
    build_model,
    config_from,
    enable_checkpointing,
    example_inputs,
    prepare_for_kbit,
    set_use_cache,
)
from napkinmath_profiler.tracing.meta_twin import meta_twin
from napkinmath_profiler.tracing.observation import CudaSettings, observe
from napkinmath_profiler.tracing.optimizer_choices import OPTIMIZERS
from napkinmath_profiler.tracing.picture_inputs import sized
from napkinmath_profiler.tracing.quantized_model import FP8, quantize
from napkinmath_profiler.tracing.trace_errors import TraceError, refusals_named
from napkinmath_profiler.tracing.trace_options import TraceOptions, options_from
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from napkinmath_profiler.tracing.training_step import TrainingLoop

NUM_TRACED_STEPS = 2  # the first step makes the optimizer's states, the second finds them


def trace(
    config: Any = None,
    train_config: TrainConfig | None = None,
    *,
    model: nn.Module | Builder | None = None,
    optimizer: torch.optim.Optimizer | OptimizerBuilder | None = None,
    step: Callable[..., Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    compute_capability: tuple[int, int] = (8, 0),
) -> Timeline:
    """The traced ``Timeline`` of two training steps, on a GPU of ``compute_capability``.

    Either ``config`` (a mapping, a path, a transformers config) with ``train_config``, or a live
    ``model`` with ``step``: a callable that does one whole step, optimizer included. A model on
    meta is traced as it is. A model with data is traced as a meta copy when ``step`` takes
    ``(model, optimizer)``, and observed on its own device when ``step`` takes nothing. A function
    in place of the model builds it on meta, one in place of the optimizer makes it over the
    parameters that are trained. The model may come first, as in ``trace(model, step=step)``.
    Raises TraceError with the way out.
    """
    if model is None and callable(config):
        config, model = None, cast("nn.Module | Builder", config)
    if (config is None) == (model is None):
        raise TraceError("trace() takes either a config or a live model; give one of them")
    if model is None:
        return timeline_of(
            trace_options(
                config,
                options_from(train_config or TrainConfig(), compute_capability=compute_capability),
            )
        )
    model = built(model)
    optimizer = optimizer_over(model, optimizer)
    if step is None:
        raise TraceError(
            "a live model needs step=, a callable that does one training step: forward, backward,"
            " optimizer.step, zero_grad"
        )
    settings = CudaSettings(compute_capability=compute_capability)
    result = trace_module(model, step, optimizer=optimizer, inputs=inputs, settings=settings)
    return timeline_of(
        result,
        origin="traced" if result.device_type == "meta" else f"observed on {result.device_type}",
    )


def trace_module(
    model: nn.Module,
    step: Callable[..., Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Mapping[str, Any] | None = None,
    settings: CudaSettings | None = None,
    num_steps: int = NUM_TRACED_STEPS,
) -> TraceResult:
    """Run ``step`` ``num_steps`` times on a live module (see ``trace``) and record it."""
    given = takes_model(step)
    device = next((p.device.type for p in model.parameters()), "meta")
    if device != "meta" and given:
        model, optimizer = meta_twin(model, optimizer)
        device = "meta"
    call = (lambda: run_step(step, model, optimizer)) if given else step

    def loop() -> None:
        for _ in range(num_steps):
            call()

    chosen = (settings or CudaSettings()) if device == "meta" else None
    return observe(model, loop, inputs=inputs, settings=chosen, device_type=device)


def trace_config(
    config: Any, *, num_layers: int | None = None, all_layers: bool = True, **options: Any
) -> TraceResult:
    """Build ``config``'s model on meta and trace its training steps; ``options`` are
    ``TraceOptions`` fields."""
    return trace_options(
        config, TraceOptions(**options), num_layers=num_layers, all_layers=all_layers
    )


def trace_options(
    config: Any, options: TraceOptions, *, num_layers: int | None = None, all_layers: bool = True
) -> TraceResult:
    """Build ``config``'s model on meta and trace its training steps.

    Without ``all_layers`` a shorter model with every context is traced and the rest written out;
    where the events do not repeat, all layers are traced after all.
    """
    config = config_from(config)
    if num_layers is not None:
        config.get_text_config().num_hidden_layers = num_layers
    if not all_layers:
        try:
            return traced_short(copy.deepcopy(config), options)
        except NotRepeating as reason:
            logging.getLogger(__name__).info("traced all layers: %s", reason)
    return traced_model(build(config, options), config, options, options.settings)


def traced_short(config: Any, options: TraceOptions) -> TraceResult:
    """Trace a model with the fewest layers that show every context, and write out the rest; raises
    NotRepeating."""
    model = build(config, options)
    cuts = [
        (stack, kept)
        for stack in find_stacks(model)
        if len(kept := kept_layers(stack.kinds)) < len(stack.kinds)
    ]
    for stack, kept in cuts:
        shorten(model, stack, kept)
    result = traced_model(model, config, options, options.settings)
    for stack, kept in cuts:
        result = extrapolated(result, stack, kept)
    return result


def traced_model(
    model: nn.Module, config: Any, options: TraceOptions, settings: CudaSettings | None
) -> TraceResult:
    """The steps of a built model; with CUDA's choices by its `settings`, with none of them without."""
    with libraries_restored(model):
        model = prepared(model, options)
        inputs = example_inputs(
            model,
            config,
            micro_batch_size=options.micro_batch_size,
            sequence_length=options.sequence_length,
            attention_mask=options.attention_mask,
            media=options.media,
            autocast=options.loop.autocast_dtype is not None,
        )
        inputs.update(forward_arguments(options.loss))
        loop = TrainingLoop(model, optimizer_of(model, options), inputs, options.loop)
        return observe(model, loop.run, inputs=inputs, settings=settings)


def optimizer_of(model: nn.Module, options: TraceOptions) -> torch.optim.Optimizer | None:
    """The chosen optimizer over what ``model`` trains."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return OPTIMIZERS[options.optimizer](trainable) if options.optimizer else None


def build(config: Any, options: TraceOptions, *, device: str = "meta") -> nn.Module:
    """The plain transformers model; raises TraceError with the reason where the library refuses
    it."""
    with refusals_named():
        return build_model(
            sized(config, options.media),
            dtype=options.dtype,
            attn_implementation=options.attention,
            device=device,
        )


def prepared_model(config: Any, options: TraceOptions, *, device: str = "meta") -> nn.Module:
    """``build`` and ``prepared``."""
    return prepared(build(config, options, device=device), options, device=device)


def prepared(model: Any, options: TraceOptions, *, device: str = "meta") -> nn.Module:
    """The model as the user's libraries set it up for training: patched, quantized, checkpointed,
    with adapters.

    Eval mode is as loading leaves it: adapters come after it, and PEFT makes their modules in
    training mode. Raises TraceError with the reason where a library refuses.
    """
    with refusals_named():
        return _set_up(model, options, device)


def _set_up(model: Any, options: TraceOptions, device: str) -> nn.Module:
    model.train(options.training)
    patch_library(model, options.kernels, options.loss, options.kernel_parts)
    if options.method is TrainMethod.QLORA:
        model = quantize(
            model,
            compute_dtype=options.quantization.compute_dtype or options.dtype,
            options=options.quantization,
            device=device,
        )
        # TRL prepares models that bitsandbytes loaded alone (trl 1.16 sft_trainer.py)
        if options.quantization.kbit_preparation and options.quantization.quant_type != FP8:
            model = prepare_for_kbit(
                model, checkpointing=options.checkpointing, use_reentrant=options.use_reentrant
            )
    if options.checkpointing:
        enable_checkpointing(
            model, use_reentrant=options.use_reentrant, every=options.checkpoint_every
        )
        if options.method is not TrainMethod.FULL and options.use_reentrant:
            model.enable_input_require_grads()
    set_use_cache(model, options.use_cache)
    if options.method is not TrainMethod.FULL:
        model = add_adapters(model, options.adapters, device=device)
    patch_adapted(
        model,
        options.kernels,
        options.mlp_tiles,
        embeddings=options.embeddings,
    )
    return model.train() if options.training else model


__all__ = [
    "TraceOptions",
    "optimizer_of",
    "prepared_model",
    "trace",
    "trace_config",
    "trace_module",
    "trace_options",
]
