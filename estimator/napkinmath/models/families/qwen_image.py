"""Qwen-Image."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.canvas import DrawnPictures
from napkinmath.ir.model_spec import SECOND_STREAM, ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.mmdit import ModulatedHead
from napkinmath.models.layers.qwen_image import QwenImageBlock, QwenImageEntrance, TwoStreams

# diffusers 0.42 train_dreambooth_lora_qwen_image.py --max_sequence_length: the most of a prompt
TEXT_TOKENS = 512
TARGETS = ("to_k", "to_q", "to_v", "to_out.0")  # the same script's target_modules
# AutoencoderKLQwenImage of diffusers 0.42; Qwen2.5-VL-7B by transformers 5.23, its embeddings
AUTOENCODER = 126_892_531
QWEN_2_5_VL, QWEN_EMBEDDING = 8_292_166_656, 152_064 * 3584
SIDE = 1024  # pixels: pipeline_qwenimage.py default_sample_size of 128 latents
PACKED = 2  # latents of a side that are one token


def qwen_image(c: Config) -> ModelSpec:
    """QwenImageTransformer2DModel (diffusers models/transformers/transformer_qwenimage.py)."""
    for field in ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "guidance_embeds"):
        if c.flag(field, False):
            raise InputError(f"config field {field}=true has no rules")
    streams = TwoStreams(
        heads=c.size("num_attention_heads", 24), size=c.size("attention_head_dim", 128)
    )
    width, channels = streams.width, c.size("in_channels", 64)
    count = c.size("num_layers", 60)
    entrance = QwenImageEntrance(
        canvas=DrawnPictures(
            side=SIDE,
            multiple=8 * PACKED,
            text=TEXT_TOKENS,
            targets=TARGETS,
            lists=("transformer_blocks",),
            autoencoder=AUTOENCODER,
            text_encoders=QWEN_2_5_VL,
            text_embeddings=QWEN_EMBEDDING,
        ),
        channels=channels,
        text_width=c.size("joint_attention_dim", 3584),
        width=width,
        turned=sum(c.sizes("axes_dims_rope") or (16, 56, 56)),
    )
    block = Stage(
        part=QwenImageBlock(streams=streams),
        path="transformer_blocks",
        checkpointed=True,
        closes=(SECOND_STREAM,),
    )
    stages = (
        Stage(part=entrance),
        block.replace(count=count - 1),
        block.replace(part=QwenImageBlock(streams=streams, last=True)),
        Stage(
            part=ModulatedHead(
                width=width, channels=c.size("patch_size", 2) ** 2 * c.size("out_channels", 16)
            )
        ),
    )
    symbols = {"h": width, "a": streams.heads, "dh": streams.size, "L": count, "v": 1}
    return c.spec(stages, symbols, family="qwen_image")
