"""Small configs of every family, in which the shapes differ from one another so that a confused axis shows."""

from __future__ import annotations

Config = dict[str, object]

# Sizes shared by most: 8 heads of 32 over hidden 256, an uneven feed-forward width, three layers.
LLAMA_LIKE: Config = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 704, "vocab_size": 1000, "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}  # fmt: skip

TINY: dict[str, Config] = {
    "llama": {"model_type": "llama", **LLAMA_LIKE},
    "llama_mha": {"model_type": "llama", **LLAMA_LIKE, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **LLAMA_LIKE, "sliding_window": None},
    "mistral_window": {"model_type": "mistral", **LLAMA_LIKE, "sliding_window": 48},
    "qwen2": {"model_type": "qwen2", **LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 48},
    "granite": {"model_type": "granite", **LLAMA_LIKE, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.01, "logits_scaling": 8.0},
    "ministral": {"model_type": "ministral", **LLAMA_LIKE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 48},
}
