"""A live model read as a ``TrainConfig``: what is trained, in which types, and which of its
switches are truly on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.base.dtypes import find_dtype
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, Sharding
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from torch import nn

from napkinmath_profiler.preflight.live_optimizer import MOST_WRAPPERS
from napkinmath_profiler.tracing.meta_model import DTYPES
from napkinmath_profiler.tracing.trace_errors import TraceError
from napkinmath_profiler.tracing.trace_options import PRECISIONS as TYPES

ATTENTION = {
    "eager": Attention.EAGER,
    "sdpa": Attention.SDPA,
    "flash_attention_2": Attention.FLASH2,
    "flash_attention_3": Attention.FLASH3,
    "flex_attention": Attention.FLEX,
    "flash_attention": Attention.FLASH2,
}
# (type of the weights that take part in products, type of the autocast region) -> precision
PRECISIONS = {
    (DTYPES[stored], autocast): precision
    for precision, (stored, autocast) in TYPES.items()
    if precision is not Precision.TF32  # a switch of torch's, not a type
}
ADAPTER_KINDS = {
    "LORA": AdapterKind.LORA,
    "IA3": AdapterKind.IA3,
    "PROMPT_TUNING": AdapterKind.PROMPT,
    "PREFIX_TUNING": AdapterKind.PREFIX,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """What a live model says of itself."""

    name: str
    config: dict[str, Any]
    """Its transformers config."""
    settings: dict[str, Any]
    """Fields of a TrainConfig."""
    wrappers: tuple[str, ...]
    num_parameters: int
    num_trained: int
    weight_bytes: int
    device_bytes: int
    """Parameters, buffers and gradients on an accelerator."""
    requested_checkpointing: bool
    """Asked for and, the model being in eval mode, perhaps without effect."""
    uses_cache: bool


def read_model(
    model: nn.Module, *, autocast_dtype: torch.dtype | None = None, shards: int = 1
) -> LiveModel:
    """Reads ``model`` without running or changing it; raises TraceError for one without a
    transformers config.

    ``autocast_dtype``: the region's that the training loop will open; ``shards``: ranks that share
    a sharded model.
    """
    inner, wrappers = unwrapped(model)
    base, adapters = _without_adapters(inner)
    config = getattr(base, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise TraceError(
            f"{type(base).__name__} has no transformers config, so its layers are not known by"
            " rule; trace its own step: napkinmath_profiler.trace.trace(model=..., step=...)"
        )
    settings = _settings(inner, base, adapters, autocast_dtype)
    parallel = _parallel(wrappers, model, shards)
    if parallel is not None:
        settings["parallel"] = parallel
    return LiveModel(
        name=getattr(config, "_name_or_path", "") or type(base).__name__,
        config=config.to_dict(),
        settings=settings,
        wrappers=wrappers,
        num_parameters=sum(_count(p) for n, p in base.named_parameters() if not _is_adapter(n)),
        num_trained=sum(_count(p) for p in inner.parameters() if p.requires_grad),
        weight_bytes=sum(p.numel() * p.element_size() for p in inner.parameters()),
        device_bytes=_device_bytes(inner),
        requested_checkpointing=_checkpointing(base)[0],
        uses_cache=bool(getattr(config.get_text_config(), "use_cache", False)),
    )


def _settings(
    inner: nn.Module, base: Any, adapters: Any, autocast_dtype: torch.dtype | None
) -> dict[str, Any]:
    """The fields of a TrainConfig that the model itself shows."""
    checkpointing, reentrant = _checkpointing(base)
    full = RecomputeConfig(kind=RecomputeKind.FULL, reentrant=reentrant)
    quantized = _quantized(base)
    computed = quantized[1] if quantized is not None else None
    attention = getattr(base.config, "_attn_implementation", None) or ""
    settings: dict[str, Any] = {
        "precision": _precision(computed or _weight_dtype(base), autocast_dtype),
        "training_mode": base.training,
        "recompute": full if checkpointing else RecomputeConfig(),
        "attention": ATTENTION.get(attention, Attention.AUTO),
    }
    if adapters is not None:
        settings["adapter"] = _adapter(inner, adapters)
    if quantized is not None:
        settings["quantization"] = quantized[0].replace(kbit_preparation=_is_widened(base))
    if adapters is None and quantized is None:
        settings["frozen"] = _frozen(base)
    return settings


def unwrapped(model: nn.Module) -> tuple[Any, tuple[str, ...]]:
    """The model inside DDP, FSDP, DeepSpeed, torch.compile and the like, and what was around it,
    outermost first."""
    wrappers: list[str] = []
    current: Any = model
    while len(wrappers) <= MOST_WRAPPERS:
        for name in ("_orig_mod", "_fsdp_wrapped_module", "module"):
            inner = getattr(current, name, None)
            if isinstance(inner, nn.Module) and not hasattr(current, "config"):
                break
            if isinstance(inner, nn.Module) and type(current).__name__ in (
                "DeepSpeedEngine",
                "FullyShardedDataParallel",
                "OptimizedModule",
            ):
                break
        else:
            return current, tuple(wrappers)
        wrappers.append(type(current).__name__)
        current = inner
    raise TraceError(
        f"{type(model).__name__} wraps a module that wraps another without end; give the"
        " transformers model itself"
    )


def _without_adapters(model: Any) -> tuple[Any, Any]:
    """(the transformers model, PEFT's config of the active adapter or None)."""
    configs = getattr(model, "peft_config", None)
    if configs and hasattr(model, "get_base_model"):
        active = (
            model.active_adapter
            if isinstance(model.active_adapter, str)
            else model.active_adapter[0]
        )
        return model.get_base_model(), configs[active]
    return model, None


def _is_adapter(name: str) -> bool:
    return any(mark in name for mark in ("lora_", "ia3_", "prompt_encoder", "modules_to_save"))


def _count(parameter: torch.Tensor) -> int:
    """Elements, of a packed 4-bit weight as many as it stands for."""
    state = getattr(parameter, "quant_state", None)
    shape = getattr(state, "shape", None)
    return int(torch.Size(shape).numel()) if shape is not None else parameter.numel()


def _device_bytes(model: nn.Module) -> int:
    held = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    return sum(t.numel() * t.element_size() for t in held if t.device.type == "cuda")


def _weight_dtype(base: nn.Module) -> torch.dtype:
    """The type that most floating elements have."""
    totals: Counter[torch.dtype] = Counter()
    for name, parameter in base.named_parameters():
        if parameter.is_floating_point() and not _is_adapter(name):
            totals[parameter.dtype] += parameter.numel()
    return totals.most_common(1)[0][0] if totals else torch.float32


def _precision(computed: torch.dtype, autocast: torch.dtype | None) -> Precision:
    if computed is torch.float32 and autocast is None and torch.backends.cuda.matmul.allow_tf32:
        return Precision.TF32
    found = PRECISIONS.get((computed, autocast)) or PRECISIONS.get(
        (computed, None if autocast is None else computed)
    )
    if found is None:
        raise TraceError(
            f"weights of {computed} are not priced; load the model in float32, bfloat16 or float16"
        )
    return found


def _checkpointing(base: Any) -> tuple[bool, bool]:
    """Whether any module asks for checkpointing, and whether in the reentrant form."""
    for module in base.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            return True, bool(getattr(function, "keywords", {}).get("use_reentrant", False))
    return False, False


def _quantized(base: nn.Module) -> tuple[QuantizationConfig, torch.dtype | None] | None:
    """bitsandbytes' 4- and 8-bit linears, and the type they compute in."""
    for module in base.modules():
        kind = type(module).__name__
        if kind == "Linear4bit":
            return _four_bit(module, _kept(base, kind))
        if kind == "Linear8bitLt":
            keep = _kept(base, kind)
            settings = QuantizationConfig(format="int8", double_quant=False, keep=keep)
            return settings, torch.float16
    return None


def _four_bit(module: Any, keep: tuple[str, ...]) -> tuple[QuantizationConfig, torch.dtype | None]:
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    asked = getattr(weight, "compress_statistics", True)
    settings = QuantizationConfig(
        format=getattr(weight, "quant_type", "nf4"),
        double_quant=bool(state.nested if state is not None else asked),
        keep=keep,
    )
    computed = getattr(module, "compute_dtype", None) or getattr(state, "dtype", None)
    if computed is torch.float32:
        return settings.replace(compute_dtype="fp32"), torch.bfloat16
    return settings, computed


def _kept(base: nn.Module, quantized: str) -> tuple[str, ...]:
    """Linears that were left as they are, by their last name."""
    plain = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if type(module) is nn.Linear and not _is_adapter(name)
    }
    return tuple(sorted(plain - {"base_layer", "default"})) or ("lm_head",)


def _is_widened(base: nn.Module) -> bool:
    """prepare_model_for_kbit_training leaves no 16-bit parameter: norms are float32."""
    norms = [
        p
        for n, p in base.named_parameters()
        if p.dim() == 1 and "norm" in n.lower() and p.is_floating_point()
    ]
    return bool(norms) and all(p.dtype is torch.float32 for p in norms)


def _adapter(model: nn.Module, config: Any) -> AdapterConfig:
    kind = ADAPTER_KINDS.get(getattr(config.peft_type, "value", str(config.peft_type)))
    if kind is None:
        raise TraceError(
            f"adapter {config.peft_type} is not priced; LoRA, DoRA, IA3, prompt and prefix"
            " tuning are"
        )
    if kind in (AdapterKind.PROMPT, AdapterKind.PREFIX):
        return AdapterConfig(kind=kind, num_virtual_tokens=config.num_virtual_tokens)
    dtypes = {p.dtype for n, p in model.named_parameters() if "lora_" in n or "ia3_" in n}
    dtype = find_dtype(str(next(iter(dtypes)))).name if len(dtypes) == 1 else "auto"
    if kind is AdapterKind.IA3:
        return AdapterConfig(kind=kind, dtype=dtype)
    return AdapterConfig(
        kind=AdapterKind.DORA if getattr(config, "use_dora", False) else AdapterKind.LORA,
        rank=config.r,
        alpha=int(config.lora_alpha),
        dropout=float(config.lora_dropout),
        dtype=dtype,
        targets=_adapted(model) or ("all-linear",),
        rank_stabilized=bool(getattr(config, "use_rslora", False)),
        trained_modules=tuple(getattr(config, "modules_to_save", None) or ()),
        num_adapters=len(getattr(model, "peft_config", {})) or 1,
    )


def _adapted(model: nn.Module) -> tuple[str, ...]:
    """Last names of the modules with LoRA adapters."""
    names = (name for name, _ in model.named_modules() if name.endswith(".lora_A"))
    return tuple(sorted({name.removesuffix(".lora_A").rpartition(".")[2] for name in names}))


def _frozen(base: nn.Module) -> tuple[str, ...]:
    """Submodules of which nothing is trained while the rest is, by name; single layers of a stack
    have none."""
    return (
        tuple(dict.fromkeys(_topmost_frozen(base)))
        if any(p.requires_grad for p in base.parameters())
        else ()
    )


def _topmost_frozen(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        parameters = list(child.parameters())
        if parameters and not any(p.requires_grad for p in parameters) and not name.isdecimal():
            yield name
        elif any(not p.requires_grad for p in parameters):
            yield from _topmost_frozen(child)


def _parallel(wrappers: tuple[str, ...], model: Any, shards: int) -> ParallelConfig | None:
    if shards < 2:
        return None
    if "DeepSpeedEngine" in wrappers:
        stage = int(model.zero_optimization_stage())
        return ParallelConfig(
            data_parallel=DataParallel(f"zero{stage}") if stage else DataParallel.DDP,
            data_parallel_size=shards,
        )
    if "FullyShardedDataParallel" in wrappers:
        return ParallelConfig(
            data_parallel=DataParallel.FSDP1, data_parallel_size=shards, sharding=Sharding.FULL
        )
    if any(type(m).__name__.startswith("FSDP") for m in model.modules()):
        return ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=shards)
    if "DistributedDataParallel" in wrappers:
        return ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=shards)
    return None


def settled(live: LiveModel, base: TrainConfig) -> TrainConfig:
    """``base`` with what the live model says."""
    return base.replace(**live.settings)
