"""Vision-language models that read documents (PaddleOCR-VL, LightOnOCR), and VideoLLaMA 3, whose
tower is PaddleOCR-VL's without learned positions."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.pictures import AnySize, AnySizeFromFactor, AnySizeUnmarked, FittedByPatch
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import (
    DEFAULT_SIDE,
    LAYER,
    joined,
    merging_projector,
    pixtral,
    text_spec,
    tied_unless_said,
)
from napkinmath.models.layers.projectors import GridProjector, ResampledProjector
from napkinmath.models.layers.vision_towers import (
    ENTERED,
    Patches,
    TowerLayer,
    TowerNorm,
    VisionAttention,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Least and most pixels of an image: transformers 5.23 PaddleOCRVLImageProcessor.size.
PADDLE_PIXELS = (384 * 384, 1536 * 1536)
# PaddleOCRVisionConfig's defaults, where they are not SigLIP's
PADDLE_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
# The same of VideoLlama3ImageProcessor, which has Qwen2VLImageProcessor's.
VIDEO_LLAMA_PIXELS = (56 * 56, 28 * 28 * 1280)


def paddleocr_vl(c: Config) -> ModelSpec:
    """PaddleOCRVLForConditionalGeneration: SigLIP's layers with rotary positions over images of any
    size (transformers models/paddleocr_vl)."""
    v, text = c.nested("vision_config"), text_spec(c, "paddleocr_vl_text")
    patch, merge = v.size("patch_size", 14), v.size("spatial_merge_size", 2)
    low, high = PADDLE_PIXELS
    pictures = AnySizeFromFactor(side=DEFAULT_SIDE, patch=patch, merge=merge, low=low, high=high)
    learned = {
        "positions": (v.size("image_size", 384) // patch) ** 2,
        "interpolated": True,
        "leaf": False,
    }
    tower = _rotary_siglip(
        Config({**PADDLE_TOWER, **v.values}, v.name, v.source),
        pictures,
        "model.visual.vision_model",
        **learned,
    )
    projector = GridProjector(merge=merge, outputs=dict(text.symbols)["h"])
    stages = [*tower, Stage(part=projector, path="model.projector")]
    return joined(c, stages, text, "paddleocr_vl", returned=())


def video_llama_3(c: Config) -> ModelSpec:
    """VideoLlama3ForConditionalGeneration on images, none of whose patches are merged: the features
    of each are sampled anew at the size that they have (transformers models/video_llama_3)."""
    v, text = c.nested("vision_config"), text_spec(c, "qwen2")
    low, high = VIDEO_LLAMA_PIXELS
    patch = v.size("patch_size", 16)
    pictures = AnySizeUnmarked(side=DEFAULT_SIDE, patch=patch, merge=1, low=low, high=high)
    tower = _rotary_siglip(v, pictures, "model.vision_model")
    projector = ResampledProjector(outputs=dict(text.symbols)["h"])
    return joined(c, [*tower, Stage(part=projector, path="model")], text, "video_llama_3")


def _rotary_siglip(v: Config, pictures: AnySize, path: str, **patches: Any) -> list[Stage]:
    """SigLIP's tower with rotary positions over images of any size; `patches`: fields of its first
    part."""
    width, heads = v.size("hidden_size", 768), v.size("num_attention_heads", 12)
    v.divides("hidden_size", "num_attention_heads", width, heads)
    first = Patches(
        pictures=pictures,
        width=width,
        patch=(pictures.patch,) * 2,
        channels=v.size("num_channels", 3),
        bias=True,
        rotary_size=width // heads,
        packed=True,
        held=True,
        **patches,
    )
    layer = TowerLayer(
        attention=VisionAttention(
            heads=heads, size=width // heads, names=("q_proj", "k_proj", "v_proj")
        ),
        width=width,
        inner=v.size("intermediate_size", 3072),
        activation=v.activation("hidden_act", "gelu_pytorch_tanh"),
    )
    return [
        Stage(part=first, path=path),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 12),
            path=f"{path}.encoder.layers",
            checkpointed=True,
            closes=(ENTERED,),
        ),
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=path),
    ]


def lighton_ocr(c: Config) -> ModelSpec:
    """LightOnOcrForConditionalGeneration: a Pixtral tower and Mistral 3's projector before Qwen 3
    (transformers models/lighton_ocr)."""
    v, text = c.nested("vision_config"), text_spec(tied_unless_said(c), "qwen3")
    merge = c.size("spatial_merge_size", 2)
    pictures = FittedByPatch(
        side=v.size("image_size", 1540), patch=v.size("patch_size", 14), merge=merge
    )
    tower = pixtral(v, merge, path="model.vision_encoder", pictures=pictures)
    projector = merging_projector(v, text, merge).replace(pictures=pictures)
    stages = [*tower, Stage(part=projector, path="model.vision_projection")]
    return joined(c, stages, text, "lighton_ocr")
