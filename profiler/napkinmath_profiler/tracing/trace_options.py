"""What to trace, and how a core ``TrainConfig`` says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    TRAINER_MAX_GRAD_NORM,
    AdapterKind,
    Attention,
    Batch,
    Kernels,
    Loss,
    Precision,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import WorkloadKind
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.precision import PRECISIONS as RULES
from napkinmath.lowering.precision import in_fp16, words_of_fp16

from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.meta_model import (
    DTYPES,
    AdapterOptions,
    QuantizationOptions,
    TrainMethod,
)
from napkinmath_profiler.tracing.observation import CudaSettings
from napkinmath_profiler.tracing.optimizer_choices import OPTIMIZERS
from napkinmath_profiler.tracing.quantized_model import FP8
from napkinmath_profiler.tracing.trace_errors import TraceError
from napkinmath_profiler.tracing.training_step import LoopOptions

ATTENTION: dict[Attention, tuple[str | None, AttentionBackend]] = {
    Attention.AUTO: (None, AttentionBackend.AUTO),
    Attention.EAGER: ("eager", AttentionBackend.AUTO),
    Attention.SDPA: ("sdpa", AttentionBackend.AUTO),
    Attention.MATH: ("sdpa", AttentionBackend.MATH),
    Attention.EFFICIENT: ("sdpa", AttentionBackend.EFFICIENT),
    Attention.FLASH: ("sdpa", AttentionBackend.FLASH),
    Attention.FLASH2: ("flash_attention_2", AttentionBackend.AUTO),
    Attention.FLASH3: ("flash_attention_2", AttentionBackend.AUTO),  # keeps the same tensors
    Attention.FLEX: ("flex_attention", AttentionBackend.AUTO),
    Attention.CUDNN: ("sdpa", AttentionBackend.CUDNN),
}
# Type of the loaded weights, and type of the autocast region if there is one.
PRECISIONS: dict[Precision, tuple[str, torch.dtype | None]] = {
    precision: (rule.parameters.name, None if rule.autocast is None else DTYPES[rule.autocast.name])
    for precision, rule in RULES.items()
    if rule.fp8_block is None and rule.parameters.name in DTYPES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What to trace; the names follow the command's flags."""

    method: TrainMethod = TrainMethod.FULL
    micro_batch_size: int = 1
    sequence_length: int = 2048
    dtype: str = "bf16"
    checkpointing: bool = False
    use_reentrant: bool = False
    checkpoint_every: int = 1
    attention: str | None = None
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    compute_capability: tuple[int, int] = (8, 0)
    kernel_workspaces: bool = True
    attention_mask: bool = False
    use_cache: bool = False
    optimizer: str | None = "adamw-foreach"
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    quantization: QuantizationOptions = field(default_factory=QuantizationOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)
    training: bool = True
    kernels: Kernels = Kernels.HF
    kernel_parts: tuple[str, ...] = ()
    loss: Loss = Loss.HF
    mlp_tiles: int = 0
    embeddings: Literal["keep", "host", "int8"] = "keep"
    media: Batch = field(default_factory=Batch)
    """Its images are those of a sequence."""

    @property
    def settings(self) -> CudaSettings:
        """Which GPU's choices are made."""
        return CudaSettings(
            attention_backend=self.attention_backend,
            compute_capability=self.compute_capability,
            kernel_workspaces=self.kernel_workspaces,
        )


def options_from(
    config: TrainConfig, *, compute_capability: tuple[int, int] = (8, 0)
) -> TraceOptions:
    """``config`` as ``TraceOptions``; raises TraceError for what no real library code can be run
    for here."""
    _refuse_untraceable(config)
    dtype, autocast = PRECISIONS[config.precision]
    if config.quantization is not None:
        dtype = Policy(config, find_stack(config.stack)).loaded_dtype.name
    attention, backend = ATTENTION[config.attention]
    recompute, stack = config.recompute, find_stack(config.stack)
    return TraceOptions(
        method=_method(config),
        micro_batch_size=_whole(config.micro_batch_size),
        sequence_length=_whole(config.sequence_length),
        dtype=dtype,
        checkpointing=recompute.kind in (RecomputeKind.FULL, RecomputeKind.EVERY),
        checkpoint_every=recompute.every if recompute.kind is RecomputeKind.EVERY else 1,
        use_reentrant=recompute.reentrant or stack.loop.reentrant_checkpointing,
        attention=attention,
        attention_backend=backend,
        compute_capability=compute_capability,
        optimizer=_optimizer(config),
        adapters=_adapters(config),
        quantization=_quantization(config),
        loop=_loop(config, autocast),
        training=config.training_mode,
        kernels=config.kernels,
        kernel_parts=config.kernel_parts,
        loss=config.loss,
        mlp_tiles=config.mlp_tiles,
        embeddings=_embeddings(config),
        media=config.batch,
    )


def _embeddings(config: TrainConfig) -> Literal["keep", "host", "int8"]:
    if config.offload.embeddings:
        return "host"
    quantization = config.quantization
    return "int8" if quantization is not None and quantization.embeddings == "int8" else "keep"


def _method(config: TrainConfig) -> TrainMethod:
    if config.adapter is None:
        return TrainMethod.FULL
    return TrainMethod.LORA if config.quantization is None else TrainMethod.QLORA


def _quantization(config: TrainConfig) -> QuantizationOptions:
    quantization = config.quantization
    if quantization is None:
        return QuantizationOptions()
    return QuantizationOptions(
        quant_type=quantization.format,
        double_quant=quantization.double_quant,
        experts=quantization.experts,
        kbit_preparation=quantization.kbit_preparation,
        compute_dtype=Policy(config, find_stack(config.stack)).product_dtype.name,
    )


def _loop(config: TrainConfig, autocast: torch.dtype | None) -> LoopOptions:
    stack = find_stack(config.stack)
    return LoopOptions(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        max_grad_norm=TRAINER_MAX_GRAD_NORM if config.clip_gradients else None,
        autocast_dtype=autocast,
        convert_outputs_to_fp32=stack.loss.outputs_to_fp32 and autocast is not None,
        keep_outputs=stack.loss.holds_logits,
        compile=config.compile,
        columns=config.workload.texts,
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TraceError(
            f"a trace runs one size, not {type(value).__name__}; give whole numbers and sweep with"
            " the analytic estimate"
        )
    return value


def _optimizer(config: TrainConfig) -> str:
    name = config.optimizer
    if name == "auto":
        name = find_stack(config.stack).optimizer.default
    if name not in OPTIMIZERS:
        raise TraceError(
            f"optimizer {name!r} cannot be traced; known: {', '.join(sorted(OPTIMIZERS))}"
        )
    return name


def _adapters(config: TrainConfig) -> AdapterOptions:
    adapter = config.adapter
    if adapter is None:
        return AdapterOptions()
    return AdapterOptions(
        rank=_whole(adapter.rank),
        alpha=adapter.alpha or _whole(adapter.rank),
        dropout=adapter.dropout,
        targets=adapter.targets[0] if adapter.targets == ("all-linear",) else adapter.targets,
        adapter_dtype=None if adapter.dtype == "auto" else adapter.dtype,
        use_dora=adapter.kind is AdapterKind.DORA,
        use_rslora=adapter.rank_stabilized,
        trained_modules=adapter.trained_modules,
    )


def refuse_workload(config: TrainConfig) -> None:
    """Raises TraceError for a workload of which a trace would run one model's step alone."""
    workload = config.workload
    if not workload.is_plain and workload.kind is not WorkloadKind.CONTRASTIVE:
        raise TraceError(
            f"--workload {workload.kind.value} cannot be traced: a trace runs the forward and"
            " backward of one model alone; leave it out, or ask the analytic estimate"
        )


def _refuse_untraceable(config: TrainConfig) -> None:
    if config.precision not in PRECISIONS:
        raise TraceError(
            f"precision {config.precision.value} runs no code that transformers has; trace bf16,"
            " fp16 or fp32 with or without autocast"
        )
    if config.precision is Precision.FP16_AUTOCAST and in_fp16(config) != config:
        raise TraceError(
            "precision fp16-autocast trains weights in fp16, whose gradients torch's scaler refuses"
            f" (amp/grad_scaler.py _unscale_grads_); trace {words_of_fp16(config)}"
        )
    if config.adapter is not None and config.adapter.kind not in (
        AdapterKind.LORA,
        AdapterKind.DORA,
    ):
        raise TraceError(
            f"adapter {config.adapter.kind.value} is not traced from a config; wrap the model"
            " yourself and trace the live module"
        )
    if config.quantization is not None and config.quantization.format not in (
        *BITSANDBYTES_4BIT,
        FP8,
    ):
        raise TraceError(
            f"quantization {config.quantization.format!r} is not traced; nf4, fp4 and fp8 run real"
            " modules of bitsandbytes and transformers"
        )
    if config.recompute.kind not in (RecomputeKind.NONE, RecomputeKind.FULL, RecomputeKind.EVERY):
        raise TraceError(
            f"checkpointing {config.recompute.kind.value} is not what transformers does; trace the"
            " live module with your policy"
        )
    offload = config.offload
    if offload.optimizer or offload.parameters or offload.activations:
        raise TraceError(
            "offloading moves bytes to the host, which a trace does not follow; use the analytic"
            " estimate"
        )
