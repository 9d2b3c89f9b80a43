"""Cohere's vision-language models: Aya Vision and Command A Vision."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.tiled_pictures import Crops, LeastScaledCrops
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import (
    PROJECTOR,
    joined,
    siglip,
    text_spec,
)
from napkinmath.models.layers.projectors import GatedProjector
from napkinmath.models.layers.tiles import Folded


def aya_vision(c: Config) -> ModelSpec:
    """AyaVisionForConditionalGeneration: SigLIP's last layer, squares of features folded, a norm
    (transformers models/aya_vision)."""
    _refuse_other_features(c)
    return _tiled(c, "aya_vision", Crops, normed=True)


def cohere2_vision(c: Config) -> ModelSpec:
    """Cohere2VisionForConditionalGeneration: SigLIP behind its norm, squares of features folded
    (transformers models/cohere2_vision)."""
    return _tiled(c, "cohere2_vision", LeastScaledCrops, inner=36864)


def _refuse_other_features(c: Config) -> None:
    for field, own in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")):
        given = c.values.get(field, own)
        if given != own:
            raise InputError(
                f"config field {field}={shown(given)} has no rules; Aya Vision has {own}"
            )


def _tiled(
    c: Config, family: str, crops: type[Crops], *, normed: bool = False, inner: int = 0
) -> ModelSpec:
    v, text = c.nested("vision_config"), text_spec(c, tie_word_embeddings=True)
    side, patch = v.size("image_size", 224), v.size("patch_size", 16)
    merge, count = c.size("downsample_factor", 2), side // patch
    if count % merge:
        raise InputError(
            f"config field downsample_factor={merge} does not fold the {count} patches of a tile's"
            " side into whole squares"
        )
    pictures = crops(side=side, patch=patch, per_tile=(count // merge) ** 2, marks_tiles=True)
    tower = siglip(v, pictures=pictures)
    if normed:  # it runs for nothing: what the projector reads comes before
        tower[-1] = tower[-1].replace(modality="idle")
    width = dict(text.symbols)["h"]
    projector = GatedProjector(
        outputs=width,
        inner=c.size("alignment_intermediate_size", inner or width),
        normed=normed,
    )
    stages = [
        *tower,
        Stage(part=Folded(merged=merge**2), path="model"),
        Stage(part=projector, path=PROJECTOR),
    ]
    return joined(c, stages, text, family)
