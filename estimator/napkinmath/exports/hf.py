"""transformers' TrainingArguments and PEFT's LoraConfig, as one file of TRL's `sft` command, or as
keyword arguments of the classes."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, DTYPES, FP16
from napkinmath.catalog.kernels import LIGER_SWITCHES
from napkinmath.config.train_config import (
    TRAINER_MAX_GRAD_NORM,
    AdapterKind,
    Kernels,
    Loss,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.exports.names import (
    attention_name,
    lora_only,
    number,
    optimizer_name,
    precision_switches,
)


def write(config: TrainConfig, model: str) -> dict[str, object]:
    """The whole file: model, TrainingArguments, TRL's SFTConfig and ModelConfig (trl sft --config
    FILE)."""
    content: dict[str, object] = {"model_name_or_path": model}
    weights = precision_switches(config)[1]
    if weights:
        content["dtype"] = weights
    attention = attention_name(config)
    if attention is not None:
        content["attn_implementation"] = attention
    content |= training_arguments(config)
    content |= {"max_length": number(config.sequence_length), "packing": config.batch.packing}
    if config.offload.activations:
        content["activation_offloading"] = True
    content["loss_type"] = "chunked_nll" if config.loss is Loss.CHUNKED else "nll"
    return content | _peft(config) | _quantization(config)


def training_arguments(config: TrainConfig) -> dict[str, object]:
    """Keyword arguments of transformers.TrainingArguments."""
    checkpointing = config.recompute.kind is not RecomputeKind.NONE
    found: dict[str, object] = {
        "per_device_train_batch_size": number(config.micro_batch_size),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        **precision_switches(config)[0],
        "optim": optimizer_name(config),
        "max_grad_norm": TRAINER_MAX_GRAD_NORM if config.clip_gradients else 0.0,
        "gradient_checkpointing": checkpointing,
    }
    if checkpointing:
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": config.recompute.reentrant}
    if config.compile:
        found["torch_compile"] = True
    if config.kernels is Kernels.LIGER:
        found["use_liger_kernel"] = True
        if config.kernel_parts:
            found["liger_kernel_config"] = {
                name: part in config.kernel_parts for name, part in LIGER_SWITCHES.items()
            } | {"cross_entropy": False}
    return found


def lora_config(config: TrainConfig) -> dict[str, object] | None:
    """Keyword arguments of peft.LoraConfig; None where every parameter is trained."""
    adapter = config.adapter
    if adapter is None:
        return None
    lora_only(config, "hf")
    return {
        "task_type": "CAUSAL_LM",
        "r": number(adapter.rank),
        "lora_alpha": adapter.alpha or number(adapter.rank),
        "lora_dropout": adapter.dropout,
        "target_modules": (
            "all-linear" if adapter.targets == ("all-linear",) else list(adapter.targets)
        ),
        "modules_to_save": list(adapter.trained_modules) or None,
        "use_rslora": adapter.rank_stabilized,
        "use_dora": adapter.kind is AdapterKind.DORA,
    }


def quantization_config(config: TrainConfig) -> dict[str, object] | None:
    """Keyword arguments of transformers.BitsAndBytesConfig, types as text; None for a dense
    base."""
    quantization = config.quantization
    if quantization is None:
        return None
    lora_only(config, "hf")
    if quantization.format == "int8":
        return {"load_in_8bit": True}
    half = FP16 if config.precision.value.startswith("fp16") else BF16
    compute = DTYPES.get(quantization.compute_dtype, half)
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quantization.format,
        "bnb_4bit_use_double_quant": quantization.double_quant,
        "bnb_4bit_compute_dtype": compute.torch,
    }


def _peft(config: TrainConfig) -> dict[str, object]:
    """TRL's ModelConfig names of the adapter's fields."""
    lora = lora_config(config)
    if lora is None:
        return {}
    found: dict[str, object] = {
        "use_peft": True,
        "lora_r": lora["r"],
        "lora_alpha": lora["lora_alpha"],
        "lora_dropout": lora["lora_dropout"],
        "lora_target_modules": lora["target_modules"],
    }
    if lora["modules_to_save"]:
        found["lora_modules_to_save"] = lora["modules_to_save"]
    return found | {key: True for key in ("use_rslora", "use_dora") if lora[key]}


def _quantization(config: TrainConfig) -> dict[str, object]:
    found = quantization_config(config)
    if found is None or "load_in_8bit" in found:
        return found or {}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": found["bnb_4bit_quant_type"],
        "use_bnb_nested_quant": found["bnb_4bit_use_double_quant"],
    }
