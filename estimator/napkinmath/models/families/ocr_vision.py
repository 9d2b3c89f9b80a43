"""Vision-language models that read documents: PaddleOCR-VL, LightOnOCR."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.pictures import AnySizeFromFactor, FittedByPatch
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
from napkinmath.models.layers.projectors import GridProjector
from napkinmath.models.layers.vision_towers import (
    ENTERED,
    Patches,
    TowerLayer,
    TowerNorm,
    VisionAttention,
)

# Least and most pixels of an image: transformers 5.23 PaddleOCRVLImageProcessor.size.
PADDLE_PIXELS = (384 * 384, 1536 * 1536)


def paddleocr_vl(c: Config) -> ModelSpec:
    """PaddleOCRVLForConditionalGeneration: SigLIP's layers with rotary positions over images of any
    size (transformers models/paddleocr_vl)."""
    v, text = c.nested("vision_config"), text_spec(c, "paddleocr_vl_text")
    tower = "model.visual.vision_model"
    width, heads = v.size("hidden_size", 1152), v.size("num_attention_heads", 16)
    v.divides("hidden_size", "num_attention_heads", width, heads)
    patch, merge = v.size("patch_size", 14), v.size("spatial_merge_size", 2)
    low, high = PADDLE_PIXELS
    pictures = AnySizeFromFactor(side=DEFAULT_SIDE, patch=patch, merge=merge, low=low, high=high)
    first = Patches(
        pictures=pictures,
        width=width,
        patch=(patch, patch),
        channels=v.size("num_channels", 3),
        bias=True,
        positions=(v.size("image_size", 384) // patch) ** 2,
        interpolated=True,
        leaf=False,
        rotary_size=width // heads,
        packed=True,
        held=True,
    )
    layer = TowerLayer(
        attention=VisionAttention(
            heads=heads, size=width // heads, names=("q_proj", "k_proj", "v_proj")
        ),
        width=width,
        inner=v.size("intermediate_size", 4304),
        activation=v.activation("hidden_act", "gelu_pytorch_tanh"),
    )
    projector = GridProjector(merge=merge, outputs=dict(text.symbols)["h"])
    stages = [
        Stage(part=first, path=tower),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 27),
            path=f"{tower}.encoder.layers",
            checkpointed=True,
            closes=(ENTERED,),
        ),
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=tower),
        Stage(part=projector, path="model.projector"),
    ]
    return joined(c, stages, text, "paddleocr_vl", returned=())


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
