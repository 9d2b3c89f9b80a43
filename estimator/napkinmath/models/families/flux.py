"""FLUX.1."""

from __future__ import annotations

from napkinmath.ir.canvas import DrawnPictures
from napkinmath.ir.model_spec import SECOND_STREAM, ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.denoiser import (
    AUTOENCODER_16,
    CLIP_L,
    CLIP_TOKENS,
    T5_EMBEDDING,
    T5_XXL,
)
from napkinmath.models.layers.flux import FluxEntrance, Together
from napkinmath.models.layers.mmdit import JointBlock, JointHeads, ModulatedHead

TEXT_TOKENS = 512  # diffusers 0.42 train_dreambooth_lora_flux.py --max_sequence_length
TARGETS = (  # the same script's target_modules
    "attn.to_k",
    "attn.to_q",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)
SIDE = 1024  # pixels: pipeline_flux.py default_sample_size of 128 latents
PACKED = 2  # latents of a side that are one token: pipeline_flux.py _pack_latents


def flux(c: Config) -> ModelSpec:
    """FluxTransformer2DModel (diffusers models/transformers/transformer_flux.py)."""
    heads = JointHeads(
        heads=c.size("num_attention_heads", 24),
        size=c.size("attention_head_dim", 128),
        norm="fused",
        rotary=True,
        text_first=True,
    )
    width = heads.width
    channels, two, one = c.size("in_channels", 64), c.size("num_layers", 19), "num_single_layers"
    count = c.size(one, 38)
    entrance = FluxEntrance(
        canvas=DrawnPictures(
            side=SIDE,
            multiple=8 * PACKED,
            text=TEXT_TOKENS,
            targets=TARGETS,
            lists=("transformer_blocks", "single_transformer_blocks"),
            autoencoder=AUTOENCODER_16,
            text_encoders=CLIP_L + T5_XXL,
            text_embeddings=CLIP_TOKENS * 768 + T5_EMBEDDING,
        ),
        channels=channels,
        text_width=c.size("joint_attention_dim", 4096),
        width=width,
        pooled=c.size("pooled_projection_dim", 768),
        guided=c.flag("guidance_embeds", False),
        turned=sum(c.sizes("axes_dims_rope") or (16, 56, 56)),
    )
    single = Together(heads=heads, text=TEXT_TOKENS)
    path, alone = "transformer_blocks", "single_transformer_blocks"
    stages = (
        Stage(part=entrance),
        Stage(
            part=JointBlock(heads=heads, keeps_outputs=True),
            count=two,
            path=path,
            checkpointed=True,
            closes=(SECOND_STREAM,),
        ),
        Stage(
            part=single.replace(first=True),
            path=f"{alone}.0",
            checkpointed=True,
            closes=(SECOND_STREAM,),
        ),
        Stage(part=single, path=alone, count=count - 1, checkpointed=True),
        Stage(
            part=ModulatedHead(
                width=width,
                channels=c.size("patch_size", 1) ** 2 * c.size("out_channels", channels),
                joined=TEXT_TOKENS,
            )
        ),
    )
    symbols = {"h": width, "a": heads.heads, "dh": heads.size, "L": two + count, "v": 1}
    return c.spec(stages, symbols, family="flux")
