"""Video-LLaVA on images: CLIP's tower and LLaVA's projector."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import PROJECTOR, clip, joined, text_spec
from napkinmath.models.layers.projectors import MlpProjector

CLIP = "clip_vision_model"


def video_llava(c: Config) -> ModelSpec:
    """VideoLlavaForConditionalGeneration: a tower of images, and one of videos that no image runs
    (transformers models/video_llava)."""
    v, text = c.nested("vision_config"), text_spec(c)
    if (kind := v.text("model_type", CLIP)) != CLIP:
        raise InputError(
            f"config field model_type={shown(kind)} of vision_config has no rules in a video_llava;"
            f" give {CLIP}"
        )
    last = c.whole("vision_feature_layer", -2)
    projector = MlpProjector(
        inputs=v.size("hidden_size", 768),
        outputs=dict(text.symbols)["h"],
        bias=c.flag("multimodal_projector_bias", True),
        activation=c.activation("projector_hidden_act", "gelu"),
        drop_first=c.text("vision_feature_select_strategy", "default") == "default",
    )
    of_videos = clip(v, last=last, path="model.video_tower")
    stages = [
        *clip(v, last=last, path="model.image_tower"),
        *(stage.replace(modality="idle", checkpointed=False) for stage in of_videos),
        Stage(part=projector, path=PROJECTOR),
    ]
    return joined(c, stages, text, "video_llava")
