"""Wan 2.1 and 2.2."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.canvas import DrawnPictures
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.wan import WanAttention, WanBlock, WanEntrance, WanHead

TEXT_TOKENS = 512  # diffusers 0.42 pipelines/wan/pipeline_wan.py max_sequence_length
TARGETS = ("to_k", "to_q", "to_v", "to_out.0")  # finetrainers args.py target_modules of Wan
# UMT5-XXL's encoder by transformers 5.23 (UMT5EncoderModel of google/umt5-xxl), its embeddings
UMT5_XXL, UMT5_EMBEDDING = 5_680_910_336, 256_384 * 4096
# AutoencoderKLWan of diffusers 0.42: of 16 channels, of 48 with patches (Wan 2.2 5B)
AUTOENCODER, AUTOENCODER_48 = 126_892_531, 704_688_668
SHOWN_TOKENS = 257  # of CLIP ViT-H: 16 x 16 patches and one for the whole
FRAMES = 81  # Wan-Video/Wan2.1 generate.py frame_num


def wan(c: Config) -> ModelSpec:
    """WanTransformer3DModel (diffusers models/transformers/transformer_wan.py)."""
    normed = c.text("qk_norm", "rms_norm_across_heads")
    if normed != "rms_norm_across_heads" or not c.flag("cross_attn_norm", True):
        raise InputError(
            f"config field qk_norm={shown(normed)} or cross_attn_norm=false has no rules"
        )
    if c.values.get("pos_embed_seq_len") is not None:
        raise InputError("config field pos_embed_seq_len (first and last frame) has no rules")
    channels, shown_width = c.size("in_channels", 16), c.values.get("image_dim")
    kernel = c.sizes("patch_size") or (1, 2, 2)
    if len(kernel) != 3:
        raise InputError(f"config field patch_size={shown(list(kernel))} has not three sizes")
    read = c.size("image_dim", 1280) if shown_width is not None else 0
    attention = WanAttention(
        heads=c.size("num_attention_heads", 40),
        size=c.size("attention_head_dim", 128),
        shown=SHOWN_TOKENS if read else 0,
    )
    deep = c.size("out_channels", 16) > 16  # the autoencoder of Wan 2.2 5B
    width, count = attention.width, c.size("num_layers", 40)
    factor = 16 if deep else 8
    canvas = DrawnPictures(
        wide=1280 if deep else 832,
        side=704 if deep else 480,
        factor=factor,
        multiple=factor * kernel[1],
        text=TEXT_TOKENS,
        targets=TARGETS,
        lists=("blocks",),
        autoencoder=AUTOENCODER_48 if deep else AUTOENCODER,
        text_encoders=UMT5_XXL,
        text_embeddings=UMT5_EMBEDDING,
        frames=FRAMES,
    )
    entrance = WanEntrance(
        canvas=canvas,
        channels=channels,
        text_width=c.size("text_dim", 4096),
        width=width,
        kernel=(kernel[0], kernel[1], kernel[2]),
        turned=attention.size,
        shown_width=read,
        shown_tokens=SHOWN_TOKENS if read else 0,
    )
    cells = kernel[0] * kernel[1] * kernel[2]
    stages = (
        Stage(part=entrance),
        Stage(
            part=WanBlock(attention=attention, inner=c.size("ffn_dim", 13824)),
            path="blocks",
            count=count,
            checkpointed=True,
        ),
        Stage(part=WanHead(width=width, channels=cells * c.size("out_channels", 16))),
    )
    symbols = {"h": width, "a": attention.heads, "dh": attention.size, "L": count, "v": 1}
    return c.spec(stages, symbols, family="wan")
