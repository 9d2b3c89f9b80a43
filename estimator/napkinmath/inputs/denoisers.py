"""What options mean for a denoiser: defaults of diffusers' examples, and what has no meaning or no
rules there."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    Kernels,
    Loss,
    Precision,
    RecomputeKind,
)
from napkinmath.inputs.option_table import BY_KEY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.model_spec import ModelSpec

STACK = "diffusers"  # the row of catalog/stacks.py that is meant where nobody names one
_FP8_BASE = (Precision.BF16_FP8_BASE, Precision.FP16_FP8_BASE)
_HALF = (Precision.FP16, Precision.FP16_AMP, Precision.FP16_AUTOCAST, *_FP8_BASE)
_OF_TEXT = ("ctx", "lengths", "packing", "images", "min_pixels", "max_pixels", "image_limit")
_SDPA = (
    Attention.AUTO,
    Attention.SDPA,
    Attention.FLASH,
    Attention.EFFICIENT,
    Attention.MATH,
    Attention.CUDNN,
)


def settled(
    spec: ModelSpec,
    canvas: DrawnPictures,
    config: TrainConfig,
    options: Mapping[str, object],
    notes: list[str],
) -> TrainConfig:
    """The training of a denoiser, with what was decided for the user in `notes`."""
    _refuse(spec, canvas, config, options)
    if "stack" not in options:
        config = config.replace(stack=STACK)
    if config.adapter is None and "precision" not in options:
        config = config.replace(precision=Precision.BF16_AMP)
        notes.append("--precision bf16-amp: diffusers' examples train all weights in fp32")
    if config.adapter is not None:
        config = config.replace(adapter=_adapter(canvas, config, config.adapter, options, notes))
    canvas.size(config.batch)
    canvas.num_frames(config.batch)
    return config


def refuse_of_text(spec: ModelSpec, config: TrainConfig) -> None:
    """Raises where a model of text is to be trained as only trainers of pictures do."""
    if config.precision in _FP8_BASE:
        raise InputError(
            f"--precision {config.precision.value} is how denoisers are trained, and {spec.name} is"
            " none; use --quant fp8"
        )


def refuse_search(spec: ModelSpec) -> None:
    """Raises where a plan is asked for: it compares tokens a second over lengths."""
    if spec.canvas is not None:
        raise InputError(
            f"{spec.name} is a denoiser: a plan searches what is faster in tokens; use"
            f" `estimate sweep {spec.name} --image {spec.canvas.side} --bs 1,2,4`"
        )


def _adapter(
    canvas: DrawnPictures,
    config: TrainConfig,
    adapter: AdapterConfig,
    options: Mapping[str, object],
    notes: list[str],
) -> AdapterConfig:
    """The adapter on the modules that diffusers' script names, in the type of a dense base: its
    add_adapter calls PEFT's inject_adapter_in_model, and casts to fp32 under fp16 alone."""
    if "targets" not in options:
        adapter = adapter.replace(targets=canvas.targets)
        notes.append(f"--targets {','.join(canvas.targets)}: what diffusers' example adapts")
    if adapter.dtype == "auto" and config.quantization is None:
        adapter = adapter.replace(dtype="fp32" if config.precision in _HALF else "base")
    return adapter


def _refuse(
    spec: ModelSpec, canvas: DrawnPictures, config: TrainConfig, options: Mapping[str, object]
) -> None:
    """Raises where an option has no meaning for a denoiser, or no rules."""
    given = next((key for key in _OF_TEXT if key in options), "")
    if given:
        raise InputError(
            f"{_flag(given)} {shown(options[given])} has no meaning for {spec.name}, whose batch is"
            f" {canvas.noun}s with {canvas.text} tokens of text each; give --image WIDTHxHEIGHT and --bs"
        )
    parallel, adapter = config.parallel, config.adapter
    split = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_parallel_size,
    )
    kind = parallel.data_parallel
    own = find_stack(config.stack).draws
    kinds = (RecomputeKind.NONE, RecomputeKind.FULL)
    for wrong, what, way in (
        (not config.workload.is_plain, "preferences, distillation and rollouts", "leave them out"),
        (max(split) > 1, "model parallelism", "use --gpus N alone, which is DDP"),
        (kind.is_fsdp or kind.is_zero, "FSDP and ZeRO", "use --gpus N alone, which is DDP"),
        ("task" in options, "other tasks", "leave --task out"),
        (config.kernels is not Kernels.HF, "patched kernels", "leave --kernels out"),
        (config.loss is not Loss.HF, "losses over a vocabulary", "leave --loss out"),
        (config.compile, "--compile", "leave it out"),
        (config.mlp_tiles != 0, "--mlp-tiles", "leave it out"),
        (config.attention not in _SDPA, "other attention than SDPA", "use --attention sdpa"),
        (config.recompute.kind not in kinds, "partial checkpointing", "use --checkpointing full"),
        (config.recompute.reentrant, "reentrant checkpointing", "use --checkpointing full"),
        ("stack" in options and not own, "this --stack", f"use --stack {STACK} or sd-scripts"),
        (
            adapter is None and config.precision in _FP8_BASE,
            "training weights that are in FP8",
            "use --lora",
        ),
        (
            adapter is not None and adapter.kind is not AdapterKind.LORA,
            "adapters other than LoRA",
            "use --lora",
        ),
    ):
        if wrong:
            raise InputError(f"{spec.name} is a denoiser: there are no rules for {what}; {way}")


def _flag(key: str) -> str:
    return f"--{BY_KEY[key].key.replace('_', '-')}"
