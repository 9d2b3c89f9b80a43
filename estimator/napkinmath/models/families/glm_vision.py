"""GLM's vision-language models: 4.1V, 4.6V Flash, GLM-OCR."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.pictures import AnySizeOfFrames
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import DEFAULT_SIDE, RMS, joined, text_spec
from napkinmath.models.layers.glm_vision import GatedMerger, MergedPatches, SampledPatches
from napkinmath.models.layers.vision_towers import Patches, TowerLayer, VisionAttention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Least and most pixels of an image's frames: transformers 5.23 Glm4vImageProcessor.size.
PIXELS = (112 * 112, 28 * 28 * 15000)
VISUAL = "model.visual"


def glm4v(c: Config) -> ModelSpec:
    """Glm4vForConditionalGeneration and Glm46VForConditionalGeneration (transformers models/glm4v,
    models/glm46v, models/glmga)."""
    family = str(c.values["model_type"])
    return joined(c, glm_tower(c.nested("vision_config")), text_spec(c), family, returned=())


def glm_ocr(c: Config) -> ModelSpec:
    """GlmOcrForConditionalGeneration: no learned positions, heads that are normed (transformers
    models/glm_ocr)."""
    v, text = c.nested("vision_config"), text_spec(c, "glm_ocr_text")
    width, heads = v.size("hidden_size", 1024), v.size("num_heads", 16)
    v.divides("hidden_size", "num_heads", width, heads)
    out, frames = v.size("out_hidden_size", 1536), v.size("temporal_patch_size", 2)
    pictures, biased = _pictures(v), v.flag("attention_bias", True)
    channels, activation = v.size("in_channels", 3), v.activation("hidden_act", "silu")
    first = Patches(
        pictures=pictures,
        width=width,
        patch=(frames, pictures.patch, pictures.patch),
        channels=channels,
        bias=True,
        convolution="patch_embed.proj",
        scope="",
        leaf=False,
        rotary_size=width // heads,
        packed=True,
    )
    layer = _layer(
        VisionAttention(heads=heads, size=width // heads, bias=biased, normed=True),
        width=width,
        inner=v.size("intermediate_size", 4096),
        activation=activation,
        mlp_bias=biased,
        output_bias=biased,
    )
    merger = GatedMerger(width=out, inner=out * channels, activation=activation)
    stages = [
        Stage(part=first, path=VISUAL),
        Stage(part=layer, count=v.size("depth", 24), path=f"{VISUAL}.blocks", checkpointed=True),
        Stage(part=MergedPatches(merge=pictures.merge, outputs=out), path=VISUAL),
        Stage(part=merger, path=f"{VISUAL}.merger"),
    ]
    return joined(c, stages, text, "glm_ocr", returned=())


def _pictures(v: Config) -> AnySizeOfFrames:
    return AnySizeOfFrames(
        side=DEFAULT_SIDE,
        patch=v.size("patch_size", 14),
        merge=v.size("spatial_merge_size", 2),
        low=PIXELS[0],
        high=PIXELS[1],
    )


def _layer(attention: VisionAttention, **sizes: Any) -> TowerLayer:
    return TowerLayer(
        attention=attention,
        norm=RMS,
        gated=True,
        names=("norm1", "norm2"),
        scope="attn",
        output="proj",
        mlp=("gate_proj", "up_proj", "down_proj"),
        **sizes,
    )


def glm_tower(v: Config) -> list[Stage]:
    """GLM's tower: sampled positions, rotary tables, squares of patches merged by a convolution."""
    width, heads = v.size("hidden_size", 1536), v.size("num_heads", 12)
    v.divides("hidden_size", "num_heads", width, heads)
    pictures = _pictures(v)
    patch, merge = pictures.patch, pictures.merge
    out, frames = v.size("out_hidden_size", 4096), v.size("temporal_patch_size", 2)
    first = SampledPatches(
        pictures=pictures,
        width=width,
        patch=(frames, patch, patch),
        channels=v.size("in_channels", 3),
        convolution="patch_embed.proj",
        positions=(v.size("image_size", 336) // patch) ** 2,
        leaf=False,
        rotary_size=width // heads,
        packed=True,
    )
    activation = v.activation("hidden_act", "silu")
    layer = _layer(
        VisionAttention(heads=heads, size=width // heads, bias=v.flag("attention_bias")),
        width=width,
        inner=out,
        activation=activation,
        mlp_bias=False,
        output_bias=False,
    )
    merger = GatedMerger(width=out, inner=v.size("intermediate_size", 13696), activation=activation)
    return [
        Stage(part=first, path=VISUAL),
        Stage(part=layer, count=v.size("depth", 24), path=f"{VISUAL}.blocks", checkpointed=True),
        Stage(part=MergedPatches(merge=merge, outputs=out), path=VISUAL),
        Stage(part=merger, path=f"{VISUAL}.merger"),
    ]
