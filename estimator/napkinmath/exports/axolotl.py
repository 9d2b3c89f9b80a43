"""axolotl's YAML (axolotl docs/config-reference)."""

from __future__ import annotations

from napkinmath.exports.names import lora_only, number, optimizer_name, precision_switches
from napkinmath.train_config import AdapterConfig, AdapterKind, Attention, Kernels, Loss, Precision, RecomputeKind, TrainConfig

_ATTENTION = {Attention.FLASH2: "flash_attention", Attention.SDPA: "sdp_attention", Attention.EAGER: "eager_attention", Attention.EFFICIENT: "xformers_attention"}  # fmt: skip
_LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy")


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
        "max_grad_norm": 1.0 if config.clip_gradients else 0.0,
        "gradient_checkpointing": "offload" if config.offload.checkpoints else config.recompute.kind is not RecomputeKind.NONE,
    }
    if config.recompute.kind is not RecomputeKind.NONE:
        content["gradient_checkpointing_kwargs"] = {"use_reentrant": config.recompute.reentrant}
    if config.attention in _ATTENTION:
        content[_ATTENTION[config.attention]] = True
    if config.adapter is not None:
        content |= _adapter(config, config.adapter)
    if config.kernels is Kernels.LIGER:
        content["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        content |= dict.fromkeys(_LIGER, True)
    if config.loss is Loss.FUSED:
        content["cut_cross_entropy"] = True
    if config.compile:
        content["torch_compile"] = True
    return content


def _precision(config: TrainConfig) -> dict[str, object]:
    if config.precision is Precision.BF16:
        return {"bf16": "full"}
    switches, weights = precision_switches(config)
    found: dict[str, object] = dict(switches)
    return found | ({"torch_dtype": weights} if weights else {})


def _adapter(config: TrainConfig, adapter: AdapterConfig) -> dict[str, object]:
    quantized = config.quantization
    four = quantized is not None and quantized.format == "nf4"
    found: dict[str, object] = {"adapter": "qlora" if four else "lora"}
    if quantized is not None:
        found["load_in_4bit" if four else "load_in_8bit"] = True
    found |= {"lora_r": number(adapter.rank), "lora_alpha": adapter.alpha or number(adapter.rank), "lora_dropout": adapter.dropout}
    if adapter.targets == ("all-linear",):
        found["lora_target_linear"] = True
    else:
        found["lora_target_modules"] = list(adapter.targets)
    if adapter.trained_modules:
        found["lora_modules_to_save"] = list(adapter.trained_modules)
    if adapter.kind is AdapterKind.DORA:
        found["peft_use_dora"] = True
    return found | ({"peft_use_rslora": True} if adapter.rank_stabilized else {})
