"""Small configs of every family, in which the shapes differ from one another so that a confused axis shows."""

from __future__ import annotations

from agreement.mixed_configs import MIXED

Config = dict[str, object]

# Sizes shared by most: 8 heads of 32 over hidden 256, an uneven feed-forward width, three layers.
LLAMA_LIKE: Config = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 704, "vocab_size": 1000, "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
}  # fmt: skip

GPT_LIKE: Config = {"n_embd": 256, "n_head": 8, "n_layer": 3, "n_positions": 1024, "vocab_size": 1000}

TINY: dict[str, Config] = {
    "llama": {"model_type": "llama", **LLAMA_LIKE},
    "llama_mha": {"model_type": "llama", **LLAMA_LIKE, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **LLAMA_LIKE, "sliding_window": None},
    "mistral_window": {"model_type": "mistral", **LLAMA_LIKE, "sliding_window": 48},
    "qwen2": {"model_type": "qwen2", **LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 48},
    "granite": {"model_type": "granite", **LLAMA_LIKE, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.01, "logits_scaling": 8.0},
    "ministral": {"model_type": "ministral", **LLAMA_LIKE, "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 48},
    "gemma": {"model_type": "gemma", **LLAMA_LIKE, "head_dim": 48},
    "gemma2": {"model_type": "gemma2", **LLAMA_LIKE, "head_dim": 48, "sliding_window": 48},
    "gemma3_text": {"model_type": "gemma3_text", **LLAMA_LIKE, "head_dim": 48, "sliding_window": 48, "sliding_window_pattern": 3, "num_key_value_heads": 1},
    "starcoder2": {"model_type": "starcoder2", **LLAMA_LIKE, "sliding_window": 512},
    "olmo": {"model_type": "olmo", **LLAMA_LIKE},
    "olmo_clip": {"model_type": "olmo", **LLAMA_LIKE, "clip_qkv": 8.0},
    "olmo2": {"model_type": "olmo2", **LLAMA_LIKE},
    "olmo3": {"model_type": "olmo3", **LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 48},
    "exaone4": {"model_type": "exaone4", **LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 48},
    "smollm3": {"model_type": "smollm3", **LLAMA_LIKE, "num_hidden_layers": 4, "pad_token_id": 0},
    "arcee": {"model_type": "arcee", **LLAMA_LIKE},
    "nemotron": {"model_type": "nemotron", **LLAMA_LIKE},
    "apertus": {"model_type": "apertus", **LLAMA_LIKE},
    "helium": {"model_type": "helium", **LLAMA_LIKE, "head_dim": 32},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", **LLAMA_LIKE, "head_dim": 32},
    "glm": {"model_type": "glm", **LLAMA_LIKE, "head_dim": 32, "num_key_value_heads": 2, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", **LLAMA_LIKE, "head_dim": 32, "num_key_value_heads": 2, "pad_token_id": 0},
    "cohere": {"model_type": "cohere", **LLAMA_LIKE},
    "cohere_qk_norm": {"model_type": "cohere", **LLAMA_LIKE, "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", **LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 48},
    "phi": {"model_type": "phi", **LLAMA_LIKE, "num_key_value_heads": 8},
    "stablelm": {"model_type": "stablelm", **LLAMA_LIKE, "num_key_value_heads": 8},
    "stablelm_parallel": {"model_type": "stablelm", **LLAMA_LIKE, "use_parallel_residual": True, "qk_layernorm": True},
    "phi3": {"model_type": "phi3", **LLAMA_LIKE, "pad_token_id": 0},
    "phi3_window": {"model_type": "phi3", **LLAMA_LIKE, "num_key_value_heads": 8, "sliding_window": 48, "pad_token_id": 0},
    "persimmon": {"model_type": "persimmon", **LLAMA_LIKE, "num_key_value_heads": 8},
    "gpt_neox": {"model_type": "gpt_neox", **LLAMA_LIKE, "rotary_pct": 0.25},
    "gpt_neox_sequential": {"model_type": "gpt_neox", **LLAMA_LIKE, "use_parallel_residual": False, "hidden_act": "gelu_fast"},
    "gpt2": {"model_type": "gpt2", **GPT_LIKE},
    "gpt2_no_dropout": {"model_type": "gpt2", **GPT_LIKE, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT_LIKE, "attn_pdrop": 0.0},
    "gpt_neo": {"model_type": "gpt_neo", "hidden_size": 256, "num_heads": 8, "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 48, "vocab_size": 1000, "max_position_embeddings": 1024},
    "gptj": {"model_type": "gptj", **GPT_LIKE, "rotary_dim": 16},
    "codegen": {"model_type": "codegen", **GPT_LIKE, "rotary_dim": 16},
    "opt": {"model_type": "opt", "hidden_size": 256, "num_attention_heads": 8, "ffn_dim": 704, "num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 1024, "word_embed_proj_dim": 256},
    "opt_projected": {"model_type": "opt", "hidden_size": 256, "num_attention_heads": 8, "ffn_dim": 704, "num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 1024, "word_embed_proj_dim": 128, "do_layer_norm_before": False, "dropout": 0.0},
    "xglm": {"model_type": "xglm", "d_model": 256, "attention_heads": 8, "ffn_dim": 704, "num_layers": 3, "vocab_size": 1000, "max_position_embeddings": 1024, "dropout": 0.0},
    "biogpt": {"model_type": "biogpt", **LLAMA_LIKE},
    "bloom": {"model_type": "bloom", "hidden_size": 256, "n_layer": 3, "n_head": 8, "vocab_size": 1000},
    "mpt": {"model_type": "mpt", "d_model": 256, "n_heads": 8, "n_layers": 3, "max_seq_len": 1024, "vocab_size": 1000},
    "falcon_7b": {"model_type": "falcon", "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 1024},
    "falcon_40b": {"model_type": "falcon", "hidden_size": 256, "num_attention_heads": 8, "num_kv_heads": 2, "num_hidden_layers": 3, "vocab_size": 1000, "new_decoder_architecture": True, "max_position_embeddings": 1024},
    "falcon_rw": {"model_type": "falcon", "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 1000, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True, "max_position_embeddings": 1024},
    **MIXED,
}
