"""axolotl's YAML (axolotl 0.19 utils/schemas/config.py, integrations/; utils/config resolve_dtype
for what its types mean)."""

from __future__ import annotations

from napkinmath.config.train_config import (
    AUTO_TILES,
    TRAINER_MAX_GRAD_NORM,
    AdapterConfig,
    AdapterKind,
    Attention,
    Kernels,
    Loss,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.exports.names import lora_only, number, optimizer_name

_ATTENTION = {
    Attention.FLASH2: "flash_attention_2",
    Attention.SDPA: "sdpa",
    Attention.EAGER: "eager",
    Attention.EFFICIENT: "xformers",
}
_LIGER = {
    "liger_rope": "rope",
    "liger_rms_norm": "norm",
    "liger_glu_activation": "gate",
    "liger_fused_linear_cross_entropy": "loss",
}
_LORA_KERNELS = {"lora_mlp_kernel": "mlp", "lora_qkv_kernel": "qkv", "lora_o_kernel": "o"}
_CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def write(config: TrainConfig, model: str) -> dict[str, object]:
    """The training part of the file; datasets and schedules are the reader's to add."""
    lora_only(config, "axolotl")
    content: dict[str, object] = {
        "base_model": model,
        "sequence_len": number(config.sequence_length),
        "sample_packing": config.batch.packing,
        "micro_batch_size": number(config.micro_batch_size),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        **_precision(config),
        "optimizer": optimizer_name(config),
        "max_grad_norm": TRAINER_MAX_GRAD_NORM if config.clip_gradients else 0.0,
        "gradient_checkpointing": config.recompute.kind is not RecomputeKind.NONE,
    }
    if config.recompute.kind is not RecomputeKind.NONE:
        content["gradient_checkpointing_kwargs"] = {"use_reentrant": config.recompute.reentrant}
    if config.offload.checkpoints:
        content["activation_offloading"] = "hidden_states"
    elif config.offload.activations:
        content["activation_offloading"] = True
    if config.attention in _ATTENTION:
        content["attn_implementation"] = _ATTENTION[config.attention]
    if config.adapter is not None:
        content |= _adapter(config, config.adapter)
    content |= _kernels(config)
    if config.compile:
        content["torch_compile"] = True
    return content


def _kernels(config: TrainConfig) -> dict[str, object]:
    """Plugins and their switches; axolotl turns on its LoRA kernels unless they are switched off."""
    found: dict[str, object] = {}
    plugins: list[str] = []
    parts = _parts(config)
    if any(part in parts for part in _LIGER.values()):
        plugins.append("axolotl.integrations.liger.LigerPlugin")
        found |= {key: part in parts for key, part in _LIGER.items()}
    if config.mlp_tiles:
        found["tiled_mlp"] = True
        if config.mlp_tiles != AUTO_TILES:
            found["tiled_mlp_num_shards"] = config.mlp_tiles
    if config.loss is Loss.FUSED:
        plugins.append(_CUT_CROSS_ENTROPY)
        found["cut_cross_entropy"] = True
    if config.adapter is not None:
        found |= {key: part in parts for key, part in _LORA_KERNELS.items()}
        found["lora_embedding_kernel"] = any(part in parts for part in _LORA_KERNELS.values())
    return found | ({"plugins": plugins} if plugins else {})


def _parts(config: TrainConfig) -> tuple[str, ...]:
    """The operations that axolotl has a switch for; of unsloth's those of adapters."""
    from napkinmath.catalog.kernels import ADAPTER_PARTS, KERNEL_SETS

    if config.kernels is Kernels.UNSLOTH:
        return ADAPTER_PARTS
    if config.kernels not in (Kernels.LIGER, Kernels.AXOLOTL):
        return ()
    return config.kernel_parts or KERNEL_SETS[config.kernels.value].parts


def _precision(config: TrainConfig) -> dict[str, object]:
    """Its switches; they settle the type of the weights as well."""
    precision = config.precision.value
    if precision.startswith("fp8"):
        return {"bf16": True, "fp8": True}
    if precision.startswith("bf16"):
        return {"bf16": True}
    if precision.startswith("fp16"):
        return {"bf16": False, **({"float16": True} if precision == "fp16" else {"fp16": True})}
    return {"bf16": False, "fp16": False, "tf32": precision == "tf32"}


def _adapter(config: TrainConfig, adapter: AdapterConfig) -> dict[str, object]:
    quantized = config.quantization
    four = quantized is not None and quantized.format == "nf4"
    found: dict[str, object] = {"adapter": "qlora" if four else "lora"}
    if quantized is not None:
        found["load_in_4bit" if four else "load_in_8bit"] = True
        if quantized.experts:
            found["quantize_moe_experts"] = True
    found |= {
        "lora_r": number(adapter.rank),
        "lora_alpha": adapter.alpha or number(adapter.rank),
        "lora_dropout": adapter.dropout,
    }
    if adapter.targets == ("all-linear",):
        found["lora_target_linear"] = True
    else:
        found["lora_target_modules"] = list(adapter.targets)
    if adapter.trained_modules:
        found["lora_modules_to_save"] = list(adapter.trained_modules)
    if adapter.kind is AdapterKind.DORA:
        found["peft_use_dora"] = True
    if adapter.dtype not in ("auto", "fp32"):
        found["peft_autocast_adapter_dtype"] = False  # adapters keep the type of the weights
    return found | ({"peft_use_rslora": True} if adapter.rank_stabilized else {})
