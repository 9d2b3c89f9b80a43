"""torchtune's recipe YAML: components by their dotted names, for the models it has builders of
(torchtune 0.6 models/)."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    TRAINER_MAX_GRAD_NORM,
    AdapterConfig,
    AdapterKind,
    Loss,
    Precision,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.exports.names import lora_only, number

# catalogued name -> (module under torchtune.models, builder)
_BUILDERS = {
    "llama-2-7b": ("llama2", "llama2_7b"),
    "llama-7b": ("llama2", "llama2_7b"),
    "llama-2-13b": ("llama2", "llama2_13b"),
    "llama-2-70b": ("llama2", "llama2_70b"),
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-8b": ("llama3_1", "llama3_1_8b"),
    "llama-3.1-70b": ("llama3_1", "llama3_1_70b"),
    "llama-3.2-1b": ("llama3_2", "llama3_2_1b"),
    "llama-3.2-3b": ("llama3_2", "llama3_2_3b"),
    "mistral-7b-v0.1": ("mistral", "mistral_7b"),
    "gemma-2b": ("gemma", "gemma_2b"),
    "gemma-7b": ("gemma", "gemma_7b"),
    "qwen2-0.5b": ("qwen2", "qwen2_0_5b"),
    "qwen2-1.5b": ("qwen2", "qwen2_1_5b"),
    "qwen2-7b": ("qwen2", "qwen2_7b"),
    "qwen2.5-0.5b": ("qwen2_5", "qwen2_5_0_5b"),
    "qwen2.5-1.5b": ("qwen2_5", "qwen2_5_1_5b_base"),
    "qwen2.5-3b": ("qwen2_5", "qwen2_5_3b"),
    "qwen2.5-7b": ("qwen2_5", "qwen2_5_7b_base"),
    "qwen2.5-14b": ("qwen2_5", "qwen2_5_14b_base"),
    "qwen2.5-32b": ("qwen2_5", "qwen2_5_32b_base"),
    "qwen2.5-72b": ("qwen2_5", "qwen2_5_72b_base"),
}
_OPTIMIZERS: dict[str, tuple[str, dict[str, object]]] = {
    "adamw-fused": ("torch.optim.AdamW", {"fused": True}),
    "adamw-foreach": ("torch.optim.AdamW", {}),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "paged-adamw": ("bitsandbytes.optim.PagedAdamW", {}),
    "sgd": ("torch.optim.SGD", {}),
}
_QLORA_BY_FLAG = ("qwen2", "qwen2_5")  # no builder called qlora_: quantize_base says it
_TIED = (
    "gemma_2b",
    "gemma_7b",
    "llama3_2_1b",
    "llama3_2_3b",
    "qwen2_0_5b",
    "qwen2_1_5b",
    "qwen2_5_0_5b",
    "qwen2_5_1_5b_base",
    "qwen2_5_3b",
)
_CHUNKED_LOSS = (  # the one that 0.6 has; the head's output comes as a list of chunks
    "torchtune.modules.loss.CEWithChunkedOutputLoss"
)
_PLAIN_LOSS = "torch.nn.CrossEntropyLoss"
_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
_DTYPES = {Precision.BF16: "bf16", Precision.FP32: "fp32", Precision.BF16_AUTOCAST: "bf16"}


def write(config: TrainConfig, model: str) -> dict[str, object]:
    """The recipe's training part; tokenizer paths, datasets and schedules are the reader's to
    add."""
    lora_only(config, "torchtune")
    if config.precision not in _DTYPES:
        raise InputError(
            f"torchtune trains in one type, not in {config.precision.value}; use --precision bf16"
            " or fp32"
        )
    optimizer = _optimizer(config)
    content: dict[str, object] = {
        "model": _model(config, model),
        "tokenizer": {"max_seq_len": number(config.sequence_length)},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": model,
        },
        "dataset": {"packed": config.batch.packing},
        "batch_size": number(config.micro_batch_size),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "optimizer": optimizer,
        "loss": {"_component_": _CHUNKED_LOSS if config.loss is Loss.CHUNKED else _PLAIN_LOSS},
        "clip_grad_norm": TRAINER_MAX_GRAD_NORM if config.clip_gradients else None,
        "compile": config.compile,
        "dtype": _DTYPES[config.precision],
        "enable_activation_checkpointing": config.recompute.kind is not RecomputeKind.NONE,
        "enable_activation_offloading": config.offload.activations,
    }
    if config.optimizer_in_backward:
        content["optimizer_in_bwd"] = True
    return content


def _optimizer(config: TrainConfig) -> dict[str, object]:
    name = (
        find_stack(config.stack).optimizer.default
        if config.optimizer == "auto"
        else config.optimizer
    )
    if name not in _OPTIMIZERS:
        raise InputError(
            f"optimizer {shown(name)} is not in torchtune's recipes; use one of"
            f" {', '.join(_OPTIMIZERS)}"
        )
    component, keywords = _OPTIMIZERS[name]
    return {"_component_": component, **keywords}


def _model(config: TrainConfig, model: str) -> dict[str, object]:
    from napkinmath.catalog.models import find_row

    row = find_row(model)
    name = str(row["name"]) if row is not None else model
    if name not in _BUILDERS:
        raise InputError(
            f"torchtune has no builder for {shown(model)} that we know; use one of"
            f" {', '.join(_BUILDERS)}"
        )
    module, builder = _BUILDERS[name]
    adapter = config.adapter
    if adapter is None:
        return {"_component_": f"torchtune.models.{module}.{builder}"}
    if "lm_head" in adapter.targets and builder in _TIED:
        raise InputError(
            f"torchtune's {builder} has no head of its own to adapt; leave lm_head out of --targets"
        )
    quantized = config.quantization is not None
    named = quantized and module not in _QLORA_BY_FLAG
    found: dict[str, object] = {
        "_component_": f"torchtune.models.{module}.{'qlora_' if named else 'lora_'}{builder}"
    }
    return found | _adapter(adapter) | ({"quantize_base": True} if quantized and not named else {})


def _adapter(adapter: AdapterConfig) -> dict[str, object]:
    every = adapter.targets == ("all-linear",)
    names = (*_ATTENTION, *_MLP) if every else adapter.targets
    attention = [_ATTENTION[name] for name in names if name in _ATTENTION]
    mlp = [name for name in names if name in _MLP]
    if len(attention) + len(mlp) + ("lm_head" in names) < len(names) or len(mlp) not in (
        0,
        len(_MLP),
    ):
        raise InputError(
            "torchtune adapts attention's projections and the whole MLP, not"
            f" {shown(','.join(names))}; choose among those"
        )
    found: dict[str, object] = {
        "lora_attn_modules": attention,
        "apply_lora_to_mlp": bool(mlp),
        **({"apply_lora_to_output": True} if "lm_head" in names else {}),
        "lora_rank": number(adapter.rank),
        "lora_alpha": adapter.alpha or number(adapter.rank),
        "lora_dropout": adapter.dropout,
    }
    return found | ({"use_dora": True} if adapter.kind is AdapterKind.DORA else {})
