"""The one place that knows transformers' classes: what each family calls its parts, by class name.
A family is a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Class names of one architecture's parts; `norm_offset` is what its norm adds to the stored
    weight."""

    norm: str
    attention: str
    mlp: str
    norm_offset: float = 0.0
    fused_gate_up: bool = False
    experts: str = ""


#: By `config.model_type`.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaRMSNorm", "LlamaAttention", "LlamaMLP"),
    "mistral": Family("MistralRMSNorm", "MistralAttention", "MistralMLP"),
    "qwen2": Family("Qwen2RMSNorm", "Qwen2Attention", "Qwen2MLP"),
    "qwen3": Family("Qwen3RMSNorm", "Qwen3Attention", "Qwen3MLP"),
    "gemma2": Family("Gemma2RMSNorm", "Gemma2Attention", "Gemma2MLP", norm_offset=1.0),
    "gemma3_text": Family("Gemma3RMSNorm", "Gemma3Attention", "Gemma3MLP", norm_offset=1.0),
    "phi3": Family("Phi3RMSNorm", "Phi3Attention", "Phi3MLP", fused_gate_up=True),
    "mixtral": Family("MixtralRMSNorm", "MixtralAttention", "", experts="MixtralExperts"),
}
