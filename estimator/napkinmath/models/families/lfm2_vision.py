"""LFM2-VL: SigLIP 2 before LFM2."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.tiled_pictures import NaflexTiles
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import (
    LAYER,
    TOWER,
    joined,
    plain_layer,
    text_spec,
    tied_unless_said,
)
from napkinmath.models.layers.idle import pooling_head
from napkinmath.models.layers.naflex import NaflexPatches, UnshuffledProjector
from napkinmath.models.layers.vision_towers import BLOCKS, ENTERED, TowerNorm

TILE = 512  # pixels of a side, transformers 5.23 Lfm2VlImageProcessor.tile_size
MOST_TILES = 10  # Lfm2VlImageProcessor.max_tiles


def lfm2_vl(c: Config) -> ModelSpec:
    """Lfm2VlForConditionalGeneration (transformers models/lfm2_vl)."""
    v = c.nested("vision_config")
    if (kind := v.text("model_type", "siglip2_vision_model")) != "siglip2_vision_model":
        raise InputError(
            f"config field model_type={shown(kind)} of vision_config has no rules in a lfm2_vl;"
            " give siglip2_vision_model"
        )
    text = text_spec(tied_unless_said(c), "lfm2")
    width, heads = v.size("hidden_size", 768), v.size("num_attention_heads", 12)
    patch, factor = v.size("patch_size", 16), c.size("downsample_factor", 2)
    first = NaflexPatches(
        pictures=NaflexTiles(
            side=TILE,
            patch=patch,
            merge=factor,
            per_tile=(TILE // (patch * factor)) ** 2,
            most=MOST_TILES,
        ),
        width=width,
        patch=(patch, patch),
        channels=v.size("num_channels", 3),
        positions=v.size("num_patches", 256),
        held=True,
    )
    layer = plain_layer(v, width, heads, "gelu_pytorch_tanh", mask=BLOCKS)
    projector = UnshuffledProjector(
        tokens=first,
        merged=factor**2,
        inner=c.size("projector_hidden_size", 2560),
        outputs=dict(text.symbols)["h"],
        bias=c.flag("projector_bias", True),
        normed=c.flag("projector_use_layernorm", True),
        activation=c.activation("projector_hidden_act", "gelu"),
    )
    stages = [
        Stage(part=first, path=TOWER),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 12),
            path=f"{TOWER}.encoder.layers",
            checkpointed=True,
            closes=(BLOCKS, ENTERED),
        ),
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=TOWER),
    ]
    if v.flag("vision_use_head", True):
        head = pooling_head(width, v.size("intermediate_size", 3072))
        stages.append(Stage(part=head, path=f"{TOWER}.head", modality="idle"))
    stages.append(Stage(part=projector, path="model"))
    return joined(c, stages, text, "lfm2_vl")
