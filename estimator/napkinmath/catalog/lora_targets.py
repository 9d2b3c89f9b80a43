"""The modules that PEFT's LoRA takes where none are named, by the model's type.

Source: peft 0.21 utils/constants.py TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING. PEFT refuses
a type without a row; there every linear is taken.
"""

from __future__ import annotations

_QUERY_VALUE, _FUSED = ("q_proj", "v_proj"), ("query_key_value",)
_OF_ENCODERS = ("query", "value")
_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("bart", "opt", "gptj", "gpt_neo", "stablelm"), _QUERY_VALUE),
    **dict.fromkeys(("llama", "llama4", "mistral", "mixtral", "qwen2", "qwen3"), _QUERY_VALUE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _QUERY_VALUE),
    **dict.fromkeys(("bloom", "gpt_neox", "chatglm", "falcon"), _FUSED),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel"), _FUSED),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm"), _OF_ENCODERS),
    **dict.fromkeys(("deberta", "deberta-v2"), ("query_proj", "value_proj")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "blip-2": ("q", "v", "q_proj", "v_proj"),
    "mpt": ("Wqkv",),
    "btlm": ("c_proj", "c_attn"),
    "codegen": ("qkv_proj",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gemma4": (r".*language_model\..*\.(q_proj|v_proj)",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "rwkv": ("key", "value", "receptance", "output"),
}


def targets_of(model_type: str) -> tuple[str, ...]:
    """The modules that PEFT takes for a model."""
    return _TARGETS.get(model_type, ("all-linear",))
