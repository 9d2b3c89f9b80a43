"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from itertools import groupby

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.canvas import DrawnPictures
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.denoiser import (
    AUTOENCODER_16,
    CLIP_BIG_G,
    CLIP_L_PROJECTED,
    CLIP_TOKENS,
    T5_EMBEDDING,
    T5_XXL,
)
from napkinmath.models.layers.mmdit import JointBlock, JointHeads, ModulatedHead
from napkinmath.models.layers.sd3 import Sd3Entrance

# CLIP's tokens, then T5's: diffusers 0.42 train_dreambooth_lora_sd3.py --max_sequence_length
TEXT_TOKENS = 77 + 77
TARGETS = (  # the same script's target_modules
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)


def sd3(c: Config) -> ModelSpec:
    """SD3Transformer2DModel (diffusers models/transformers/transformer_sd3.py)."""
    normed = c.text("qk_norm", "")
    if normed not in ("", "rms_norm"):
        raise InputError(f"config field qk_norm={shown(normed)} has no rules")
    heads = JointHeads(
        heads=c.size("num_attention_heads", 18),
        size=c.size("attention_head_dim", 64),
        norm="eager" if normed else "",
    )
    width, count = heads.width, c.size("num_layers", 18)
    channels, patch = c.size("in_channels", 16), c.size("patch_size", 2)
    places = c.size("pos_embed_max_size", 96)
    told = c.size("caption_projection_dim", 1152)
    if told != width:
        raise InputError(
            f"caption_projection_dim={told} is not the width of the blocks, {width}; make them agree"
        )
    entrance = Sd3Entrance(
        canvas=DrawnPictures(
            side=8 * c.size("sample_size", 128),
            multiple=8 * patch,
            text=TEXT_TOKENS,
            targets=TARGETS,
            lists=("transformer_blocks",),
            autoencoder=AUTOENCODER_16,
            text_encoders=CLIP_L_PROJECTED + CLIP_BIG_G + T5_XXL,
            text_embeddings=CLIP_TOKENS * (768 + 1280) + T5_EMBEDDING,
            most=8 * patch * places,
        ),
        channels=channels,
        text_width=c.size("joint_attention_dim", 4096),
        width=width,
        patch=patch,
        places=places,
        told=told,
        pooled=c.size("pooled_projection_dim", 2048),
    )
    twice = c.layer_indices("dual_attention_layers", count)
    blocks = groupby(
        JointBlock(heads=heads, last=i == count - 1, twice=i in twice) for i in range(count)
    )
    stages = (
        Stage(part=entrance),
        *(
            Stage(part=block, count=len(list(alike)), path="transformer_blocks", checkpointed=True)
            for block, alike in blocks
        ),
        Stage(
            part=ModulatedHead(
                width=width, channels=patch**2 * c.size("out_channels", channels), rows=True
            )
        ),
    )
    symbols = {"h": width, "a": heads.heads, "dh": heads.size, "L": count, "v": 1}
    return c.spec(stages, symbols, family="sd3")
