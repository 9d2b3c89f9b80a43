"""Attention implementations that transformers' classes refuse, by model type.

A class names what it runs (`_supports_sdpa`, `_supports_flash_attn`, `_supports_flex_attn`;
transformers 5.23 modeling_utils.py PreTrainedModel, False where it says nothing) and raises a
ValueError where a run asks for another (_flash_attn_can_dispatch, _sdpa_can_dispatch,
_flex_attn_can_dispatch). Types that are not here run all three, except those with remote code, of
which nothing is known; learned forms say it themselves.
"""

from __future__ import annotations

FLASH_ATTENTION, FLEX_ATTENTION, SDPA = "flash_attention_2", "flex_attention", "sdpa"
"""Words of `attn_implementation`; the first stands for every version."""
_FUSED = (FLASH_ATTENTION, FLEX_ATTENTION, SDPA)

# model type -> the implementations that its classes refuse, in alphabetical order
REFUSED_ATTENTION: dict[str, tuple[str, ...]] = {
    "bamba": (FLEX_ATTENTION,),
    "blip-2": (FLASH_ATTENTION,),
    "bloom": _FUSED,
    "codegen": _FUSED,
    "convnext": _FUSED,
    "convnextv2": _FUSED,
    "cosmos3_omni": (FLEX_ATTENTION,),
    "deberta-v2": _FUSED,
    "deepseek_v32": (FLASH_ATTENTION, FLEX_ATTENTION),
    "deepseek_vl": (FLEX_ATTENTION,),
    "falcon": (FLEX_ATTENTION,),
    "falcon_h1": (FLEX_ATTENTION,),
    "falcon_mamba": _FUSED,
    "gemma2": (SDPA,),
    "glm46v": (FLEX_ATTENTION,),
    "glm4v": (FLEX_ATTENTION,),
    "glm_moe_dsa": (FLASH_ATTENTION, FLEX_ATTENTION),
    "glm_ocr": (FLEX_ATTENTION,),
    "glmga": (FLEX_ATTENTION,),
    "gpt2": (FLEX_ATTENTION,),
    "gpt_bigcode": (FLEX_ATTENTION,),
    "gpt_neo": (FLEX_ATTENTION, SDPA),
    "gpt_oss": (SDPA,),
    "gptj": (FLEX_ATTENTION, SDPA),
    "jamba": (FLEX_ATTENTION,),
    "kimi_k25": (FLEX_ATTENTION,),
    "llama4": (FLASH_ATTENTION,),
    "llama4_text": (FLASH_ATTENTION,),
    "mamba": _FUSED,
    "mamba2": _FUSED,
    "mllama": (FLASH_ATTENTION,),
    "mllama_text_model": (FLASH_ATTENTION,),
    "mpt": _FUSED,
    "mt5": (FLASH_ATTENTION,),
    "umt5": (FLASH_ATTENTION,),
    "olmo_hybrid": (FLEX_ATTENTION,),
    "olmoe": (FLEX_ATTENTION,),
    "persimmon": (FLEX_ATTENTION,),
    "qwen2_5_omni_thinker": (FLEX_ATTENTION,),
    "qwen2_5_vl": (FLEX_ATTENTION,),
    "qwen2_vl": (FLEX_ATTENTION,),
    "qwen3_5": (FLEX_ATTENTION,),
    "qwen3_5_moe": (FLEX_ATTENTION,),
    "qwen3_5_moe_text": (FLEX_ATTENTION,),
    "qwen3_5_text": (FLEX_ATTENTION,),
    "qwen3_next": (FLEX_ATTENTION,),
    "qwen3_omni_moe_thinker": (FLEX_ATTENTION,),
    "qwen3_vl": (FLEX_ATTENTION,),
    "resnet": _FUSED,
    "stablelm": (FLEX_ATTENTION,),
    "t5": (FLASH_ATTENTION,),
    "vaultgemma": (SDPA,),
    "video_llama_3": (FLEX_ATTENTION,),
    "video_llava": (FLEX_ATTENTION,),
    "wavlm": _FUSED,
    "xglm": _FUSED,
}

_TYPES_BY_RELEASE: dict[tuple[int, int], tuple[str, ...]] = {
    (4, 36): ("llama", "falcon", "bart", "gpt_bigcode", "whisper"),
    (4, 37): ("mistral", "mixtral"),
    (4, 39): ("phi", "stablelm"),
    (4, 41): (
        *("bert", "deit", "hubert", "vit", "wav2vec2", "unispeech", "unispeech-sat"),
        "data2vec-audio",
    ),
    (4, 42): ("gpt2", "gpt_neox"),
    (4, 43): ("clip", "siglip"),
    (4, 45): (
        *("albert", "biogpt", "camembert", "dinov2", "m2m_100", "mbart", "phi3", "roberta"),
        *("xlm-roberta", "xlm-roberta-xl"),
    ),
    (4, 46): ("distilbert", "llava", "llava_next", "opt", "qwen2_audio"),
    (4, 48): ("beit",),
    (4, 52): ("fuyu",),
    (4, 53): ("blenderbot", "blenderbot-small", "marian", "pegasus", "persimmon", "plbart"),
    (4, 57): ("esm",),
}
SDPA_SINCE = {name: since for since, names in _TYPES_BY_RELEASE.items() for name in names}
"""Model type -> the first release whose classes run SDPA, which is the default from then on, where
earlier ones have their own scores and softmax (`_supports_sdpa` in models/*/modeling_*.py of each
minor release from 4.34 to 4.57)."""
