"""The one place that knows transformers' classes: what each family calls its parts, by class name.
A family is a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelFamily:
    """Class names of one architecture's parts; `norm_offset` is what its norm adds to the stored
    weight."""

    norm: str
    attention: str
    mlp: str
    norm_offset: float = 0.0
    fused_gate_up: bool = False
    experts: str = ""
    keeps: Mapping[str, str] = field(default_factory=dict)
    """What stays as it is ("rope", "mlp"), and why."""


#: By `config.model_type`.
FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily("LlamaRMSNorm", "LlamaAttention", "LlamaMLP"),
    "mistral": ModelFamily("MistralRMSNorm", "MistralAttention", "MistralMLP"),
    "qwen2": ModelFamily("Qwen2RMSNorm", "Qwen2Attention", "Qwen2MLP"),
    "qwen3": ModelFamily("Qwen3RMSNorm", "Qwen3Attention", "Qwen3MLP"),
    "gemma2": ModelFamily("Gemma2RMSNorm", "Gemma2Attention", "Gemma2MLP", norm_offset=1.0),
    "gemma3_text": ModelFamily("Gemma3RMSNorm", "Gemma3Attention", "Gemma3MLP", norm_offset=1.0),
    "phi3": ModelFamily("Phi3RMSNorm", "Phi3Attention", "Phi3MLP", fused_gate_up=True),
    "mixtral": ModelFamily("MixtralRMSNorm", "MixtralAttention", "", experts="MixtralExperts"),
    "qwen3_moe": ModelFamily(
        "Qwen3MoeRMSNorm", "Qwen3MoeAttention", "Qwen3MoeMLP", experts="Qwen3MoeExperts"
    ),
    "gpt_oss": ModelFamily(
        "GptOssRMSNorm",
        "GptOssAttention",
        "",
        experts="GptOssExperts",
        keeps={
            "rope": "its cos and sin are of half a head",
            "mlp": "a clamped gate of interleaved halves",
        },
    ),
}
