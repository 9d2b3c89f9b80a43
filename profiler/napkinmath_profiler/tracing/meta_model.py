"""The user's model, built by their own libraries from a config on the meta device."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from napkinmath.base.dtypes import BF16, FP16, FP32
from torch import nn

from napkinmath_profiler.tracing.trace_errors import TraceError

DTYPES: dict[str, torch.dtype] = {
    dtype.name: getattr(torch, dtype.torch) for dtype in (FP32, BF16, FP16)
}
LANGUAGE_LOSS_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
)
CLASS_OF_ARCHITECTURE_SUFFIX = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


class TrainMethod(str, Enum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """LoRA as PEFT takes it; ``adapter_dtype`` None means what PEFT does (float32 over a 16-bit
    base)."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    adapter_dtype: str | None = None
    use_dora: bool = False
    use_rslora: bool = False
    trained_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOptions:
    """4-bit weights as bitsandbytes takes them."""

    quant_type: str = "nf4"
    double_quant: bool = True
    kbit_preparation: bool = True
    quant_storage: str = "uint8"
    """Type that holds the packed weights; a floating one can be sharded."""


def config_from(source: Any) -> Any:
    """A ``PretrainedConfig`` from a mapping, a path to a config.json or its folder, or a config as
    it is."""
    from transformers import AutoConfig

    if isinstance(source, Mapping):
        values = dict(source)
        if "model_type" not in values:
            raise ValueError(
                "the config has no model_type, so transformers cannot tell which model it is; add"
                " one, such as llama"
            )
        return AutoConfig.for_model(values.pop("model_type"), **values)
    if isinstance(source, (str, bytes)) or hasattr(source, "__fspath__"):
        return AutoConfig.from_pretrained(os.fsdecode(source))
    return source


def auto_class(config: Any) -> Any:
    """The transformers auto class that builds ``config`` with its training loss."""
    import transformers

    architecture = (getattr(config, "architectures", None) or [""])[0]
    for suffix, name in CLASS_OF_ARCHITECTURE_SUFFIX.items():
        if (
            architecture.endswith(suffix)
            and type(config) in getattr(transformers, name)._model_mapping
        ):
            return getattr(transformers, name)
    # A config of two towers may also be mapped to its text alone (mllama): the whole model is what
    # is trained.
    first = ("AutoModelForImageTextToText",) if hasattr(config, "vision_config") else ()
    for name in (*first, *LANGUAGE_LOSS_CLASSES):
        candidate = getattr(transformers, name)
        if type(config) in candidate._model_mapping:
            return candidate
    raise ValueError(
        f"no transformers auto class with a loss knows the config type {type(config).__name__};"
        " pass a live model instead"
    )


def build_model(
    config: Any, *, dtype: str, attn_implementation: str | None, device: str = "meta"
) -> nn.Module:
    """The transformers model of ``config`` on ``device``, in ``dtype``, in training mode.

    ``attn_implementation`` None is what transformers takes by itself: SDPA where the model has it,
    else eager.
    """
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        model = auto_class(config).from_config(config, dtype=DTYPES[dtype], **chosen)
    _keep_in_float32(model, DTYPES[dtype])
    model.train()
    return model


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep in float32 what ``from_pretrained`` keeps (transformers modeling_utils.py,
    ``_keep_in_fp32_modules``)."""
    kept: set[str] = set()
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not kept:
        return
    pattern = re.compile("|".join(rf"((^|\.){name}($|\.))" for name in sorted(kept)))
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.to(torch.float32)


def bitsandbytes_package() -> Any:
    """bitsandbytes, imported without its remarks on this machine's lack of a GPU; TraceError where
    it is not installed."""

    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    try:
        import bitsandbytes
    except ImportError as reason:
        raise TraceError(
            f"this step needs bitsandbytes ({reason}); pip install bitsandbytes, or leave quantized"
            " weights and 8-bit states out"
        ) from None
    return bitsandbytes


def quantize_4bit(
    model: nn.Module, *, compute_dtype: str, options: QuantizationOptions, device: str = "meta"
) -> nn.Module:
    """Replace the linears transformers would replace by bitsandbytes ``Linear4bit``; off the meta
    device their weights are random."""
    bitsandbytes = bitsandbytes_package()
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.quant_type,
        bnb_4bit_use_double_quant=options.double_quant,
        bnb_4bit_compute_dtype=DTYPES[compute_dtype],
        bnb_4bit_quant_storage=DTYPES.get(options.quant_storage, torch.uint8),
    )
    skipped = HfQuantizer.get_modules_to_not_convert(
        cast(Any, model), None, getattr(model, "_keep_in_fp32_modules", None)
    )
    model = replace_with_bnb_linear(model, skipped, settings)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            _quantize_linear(module, DTYPES[compute_dtype], device)
    forget_meta_tables()
    for mark in ("is_loaded_in_4bit", "is_quantized"):
        setattr(model, mark, True)
    return model


def _quantize_linear(module: Any, dtype: torch.dtype, device: str) -> None:
    if device != "meta":
        _give_data(module, dtype, device)
    weight = module.weight
    weight.data = weight.data.to(dtype)
    weight.module = module
    weight._quantize(torch.device(device))
    if module.bias is not None:
        module.bias.data = module.bias.data.to(dtype)


def forget_meta_tables() -> None:
    """Empties bitsandbytes' cache of code tables of those without values, which it would hand a
    later, real quantization."""
    tables = getattr(sys.modules.get("bitsandbytes.functional"), "name2qmap", {})
    for name in [name for name, table in tables.items() if getattr(table, "is_meta", False)]:
        del tables[name]


def _give_data(module: Any, dtype: torch.dtype, device: str) -> None:
    """Random values for a ``Linear4bit`` on meta, spread as a model's initialization spreads
    them."""
    weight = module.weight
    data = torch.empty(weight.shape, dtype=dtype, device=device).normal_(0.0, 0.02)
    kept = {
        name: getattr(weight, name)
        for name in ("quant_type", "compress_statistics", "blocksize", "quant_storage")
    }
    module.weight = type(weight)(data, requires_grad=False, module=module, **kept)
    if module.bias is not None:
        module.bias = nn.Parameter(
            torch.zeros(module.bias.shape, dtype=dtype, device=device), requires_grad=False
        )


def prepare_for_kbit(model: nn.Module, *, checkpointing: bool, use_reentrant: bool) -> nn.Module:
    """PEFT's ``prepare_model_for_kbit_training``."""
    from peft import prepare_model_for_kbit_training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )


def enable_checkpointing(
    model: Any, *, use_reentrant: bool, every: int = 1, offload: bool = False
) -> None:
    """transformers' activation checkpointing, by the name the installed version has for it."""
    kwargs = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.activation_checkpointing_enable(kwargs, every_n_layers=every, offload=offload)
    elif every == 1 and not offload:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        raise ValueError(
            "the installed transformers checkpoints every layer or none; upgrade it for every:K and"
            " offload"
        )


def add_adapters(model: nn.Module, options: AdapterOptions, *, device: str = "meta") -> nn.Module:
    """PEFT's LoRA around ``model``."""
    from peft import LoraConfig, get_peft_model

    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    settings = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
        modules_to_save=list(options.trained_modules) or None,
    )
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, settings)
    if options.adapter_dtype is not None:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[options.adapter_dtype])
    return wrapped


def quantization_constants(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every tensor held by the 4-bit weights' quantization states, named after the module."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in model.named_modules():
        held = getattr(getattr(module, "weight", None), "quant_state", None)
        state = (
            held if held is not None else getattr(module, "quant_state", None)
        )  # a sharded weight has left it to its module
        for prefix, owner in (("", state), ("state2.", getattr(state, "state2", None))):
            for name in ("absmax", "code", "offset"):
                tensor = getattr(owner, name, None)
                if isinstance(tensor, torch.Tensor):
                    found.append((f"{path}.quant_state.{prefix}{name}", tensor))
    return found


def example_inputs(
    model: nn.Module,
    config: Any,
    *,
    micro_batch_size: int,
    sequence_length: int,
    attention_mask: bool = False,
) -> dict[str, Any]:
    """Meta inputs and labels for the loss of ``model``."""
    with torch.device("meta"):
        if getattr(model, "main_input_name", "input_ids") == "pixel_values":
            dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
            return _image_inputs(config, micro_batch_size, dtype)
        shape = (micro_batch_size, sequence_length)
        names = ("input_ids", "labels", *(("attention_mask",) if attention_mask else ()))
        return {name: torch.empty(shape, dtype=torch.long) for name in names}


def _image_inputs(config: Any, count: int, dtype: torch.dtype) -> dict[str, Any]:
    size = config.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return {
        "pixel_values": torch.empty(count, config.num_channels, height, width, dtype=dtype),
        "labels": torch.empty(count, dtype=torch.long),
    }


def configs_of(model: nn.Module) -> list[Any]:
    """Every config object that modules of ``model`` hold, each once, sub-configs included."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            found.setdefault(id(config), config)
            for value in vars(config).values():
                if hasattr(value, "to_dict"):
                    found.setdefault(id(value), value)
    return list(found.values())


def set_use_cache(model: nn.Module, use_cache: bool) -> None:
    """Say whether forwards fill a key/value cache: transformers' Trainer switches it off, a bare
    loop leaves the default on."""
    for config in configs_of(model):
        config.use_cache = use_cache
