"""Tiny configs of many architectures, as small as their code allows, for tracing real steps of
each."""

from __future__ import annotations

Config = dict[str, object]

COMMON: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Config = {
    **EXPERTS,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
GPT2_NAMES: Config = {"n_embd": 64, "n_head": 4, "n_layer": 2}
OWN: dict[str, Config] = {
    "llama": {},
    "mistral": {},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "gpt2": GPT2_NAMES,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {**GPT2_NAMES, "rotary_dim": 8},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "gpt_bigcode": GPT2_NAMES,
    "starcoder2": {},
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoehybrid": {
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 64,
    },
    "olmo": {},
    "olmo2": {},
    "olmoe": EXPERTS,
    "smollm3": {"pad_token_id": 0},
    "stablelm": {},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {**EXPERTS, "head_dim": 16},
    "cohere": {},
    "cohere2": {},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 128},
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "vit": {"image_size": 32, "patch_size": 8},
    "llama4_text": {**EXPERTS, "head_dim": 16, "intermediate_size_mlp": 128},
    "qwen3_next": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 32,
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
    "nemotron": {},
    "lfm2": {},
    "modernbert": {"pad_token_id": 0},
}
FAMILIES: dict[str, Config] = {
    name: {"model_type": name, **COMMON, **own} for name, own in OWN.items()
}

# PEFT refuses these with its "all-linear" targets (Mamba's out_proj) or breaks on a router that is
# a Linear and returns a tuple.
WITHOUT_ALL_LINEAR_LORA = frozenset({"mamba2", "falcon_h1", "llama4_text"})
