"""Kimi K2.5 and K2.6: MoonViT's tower before DeepSeek V3's text."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.pictures import NeverEnlarged
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import (
    DEFAULT_SIDE,
    LAYER,
    TOWER,
    joined,
    text_spec,
    tied_unless_said,
)
from napkinmath.models.layers.kimi_vision import BicubicPatches, FrameMean
from napkinmath.models.layers.projectors import MlpProjector
from napkinmath.models.layers.vision_towers import TowerLayer, VisionAttention


def kimi_k25(c: Config) -> ModelSpec:
    """Kimi_K25ForConditionalGeneration (transformers models/kimi_k25): the published tower is the
    class's default."""
    c = Config({"vision_config": {}, **c.values}, c.name, c.source)
    v, text = c.nested("vision_config"), text_spec(tied_unless_said(c))
    width, heads = v.size("hidden_size", 1152), v.size("num_attention_heads", 16)
    v.divides("hidden_size", "num_attention_heads", width, heads)
    merge, _ = v.sizes("merge_kernel_size") if "merge_kernel_size" in v else (2, 2)
    patch = v.size("patch_size", 14)
    first = BicubicPatches(
        pictures=NeverEnlarged(side=DEFAULT_SIDE, patch=patch, merge=merge),
        width=width,
        patch=(patch, patch),
        positions=v.size("pos_emb_height", 64) * v.size("pos_emb_width", 64),
        frames=v.size("pos_emb_time", 4) + 1,
        leaf=False,
        rotary_size=width // heads,
        packed=True,
    )
    layer = TowerLayer(
        attention=VisionAttention(
            heads=heads, size=width // heads, names=("q_proj", "k_proj", "v_proj")
        ),
        width=width,
        inner=v.size("intermediate_size", 4304),
        activation=v.activation("hidden_act", "gelu_pytorch_tanh"),
        names=("norm1", "norm2"),
        scope="attn",
        output="proj",
    )
    projector = MlpProjector(
        inputs=width,
        outputs=dict(text.symbols)["h"],
        inner=width * merge**2,
        merged=merge**2,
        norm=LAYER,
        norm_name="pre_norm",
        linears=("in_proj", "out_proj"),
    )
    stages = [
        Stage(part=first, path=TOWER),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 27),
            path=f"{TOWER}.layers",
            checkpointed=True,
        ),
        Stage(part=FrameMean(), path=TOWER),
        Stage(part=projector, path="model.mm_projector"),
    ]
    return joined(c, stages, text, "kimi_k25", returned=())
