"""Small configs of models that read images beside a text, of the families that tiny_configs.py does
not have."""

from __future__ import annotations

Config = dict[str, object]
TEXT: Config = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: Config = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 8,
}

IMAGES: dict[str, Config] = {
    "paligemma": {
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma", **TEXT},
        "vision_config": {
            "model_type": "siglip_vision_model",
            **TOWER,
            "vision_use_head": False,
            "projection_dim": 128,
        },
        "projection_dim": 128,
        "image_token_id": 5,
    },
    "pixtral": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 32},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_id": 5,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 32},
        "vision_feature_layer": -1,
        "image_token_id": 5,
        "spatial_merge_size": 2,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            **TEXT,
            "intermediate_size_mlp": 192,
            "num_local_experts": 4,
            "attention_chunk_size": 512,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            **TOWER,
            "intermediate_size": 384,
            "vision_output_dim": 128,
            "projector_input_dim": 128,
            "projector_output_dim": 128,
        },
        "image_token_id": 5,
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            **TEXT,
            "global_head_dim": 64,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 512,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            **TOWER,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "position_embedding_size": 64,
            "use_clipped_linears": True,
            "standardize": True,
        },
        "audio_config": None,
        "image_token_id": 5,
        "video_token_id": 6,
        "audio_token_id": 7,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "smolvlm_vision", **TOWER},
        "scale_factor": 4,
        "image_token_id": 5,
    },
    "internvl": {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {
            "model_type": "internvl_vision",
            **TOWER,
            "image_size": [64, 64],
            "patch_size": [8, 8],
            "use_qk_norm": True,
        },
        "image_token_id": 5,
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128], [192, 64], [64, 192]],
        "vision_feature_layer": -2,
        "image_token_id": 5,
    },
}
