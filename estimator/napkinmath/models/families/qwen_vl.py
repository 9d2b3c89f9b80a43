"""Qwen's vision-language models: towers of packed patches, merged by two by two."""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.tape import Tape
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import DEFAULT_SIDE, LAYER, RMS, joined, text_spec
from napkinmath.models.layers.norm import Norm
from napkinmath.models.layers.vision_towers import (
    MlpProjector,
    Patches,
    TowerLayer,
    VisionAttention,
)


def qwen2_vl(c: Config) -> ModelSpec:
    """Qwen2VLForConditionalGeneration (transformers models/qwen2_vl)."""
    v = c.nested("vision_config")
    width = v.size("embed_dim", 1280)
    tower, patches = _qwen_tower(
        v, width, int(width * v.number("mlp_ratio", 4)), norm=LAYER, activation="quick_gelu"
    )
    merger = _qwen_merger(v, width, v.size("hidden_size", 3584), patches, norm=LAYER)
    return joined(c, [*tower, merger], text_spec(c, "qwen2"), "qwen2_vl")


def qwen2_5_vl(c: Config) -> ModelSpec:
    """Qwen2_5_VLForConditionalGeneration: gated feed-forward with biases, windows of attention in
    most layers (transformers models/qwen2_5_vl)."""
    v = c.nested("vision_config")
    width = v.size("hidden_size", 3584)
    tower, patches = _qwen_tower(
        v, width, v.size("intermediate_size", 3420), norm=RMS, activation="silu", gated=True
    )
    return joined(
        c,
        [*tower, _qwen_merger(v, width, v.size("out_hidden_size", 3584), patches, norm=RMS)],
        text_spec(c, "qwen2"),
        "qwen2_5_vl",
    )


def qwen3_vl(c: Config) -> ModelSpec:
    """Qwen3VLForConditionalGeneration: learned positions, features of three depths (transformers
    models/qwen3_vl)."""
    return _qwen3_vl(c, "qwen3", "qwen3_vl")


def qwen3_vl_moe(c: Config) -> ModelSpec:
    """Qwen3VLMoeForConditionalGeneration (transformers models/qwen3_vl_moe)."""
    return _qwen3_vl(c, "qwen3_vl_moe_text", "qwen3_vl_moe")


def _qwen3_vl(c: Config, text: str, family: str) -> ModelSpec:
    return qwen3_tower(c, text_spec(c, text), family)


def qwen3_tower(
    c: Config, text: ModelSpec, family: str, *, deep_features: bool = True
) -> ModelSpec:
    """Qwen 3 VL's tower before a text model."""
    v = c.nested("vision_config")
    width = v.size("hidden_size", 1152)
    tower, patches = _qwen_tower(
        v,
        width,
        v.size("intermediate_size", 4304),
        norm=LAYER,
        activation="gelu_pytorch_tanh",
        mlp=("linear_fc1", "linear_fc2"),
        conv_bias=True,
        positions=v.size("num_position_embeddings", 2304),
    )
    merged = v.size("spatial_merge_size", 2) ** 2
    out = v.size("out_hidden_size", 3584)
    merger = MlpProjector(
        inputs=width,
        outputs=out,
        tokens=patches // merged,
        inner=width * merged,
        merged=merged,
        norm=LAYER,
        linears=("linear_fc1", "linear_fc2"),
    )
    deep = merger.replace(norm_merged=True)
    if not deep_features:
        depths = 0
    else:
        named = "deepstack_visual_indexes" in v
        depths = len(v.sizes("deepstack_visual_indexes")) if named else 3
    extra = (
        [
            Stage(
                part=DeepFeatures(merger=deep, count=depths),
                path="model.visual.deepstack_merger_list",
            )
        ]
        if depths
        else []
    )
    return joined(c, [*tower, *extra, Stage(part=merger, path="model.visual.merger")], text, family)


class DeepFeatures(Part):
    """Mergers of hidden states from inner depths, whose results are added to the first text layers'
    image rows.

    They are priced at the end of the tower, on its last hidden states.
    """

    merger: MlpProjector
    count: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        for index in range(self.count):
            with t.scope(str(index)):
                merged = self.merger.record(t, x, shared)
            assert merged is not None
            shared[f"deep features {index}"] = merged
        return t.view(x, x.axes)


def _qwen_tower(
    v: Config,
    width: int,
    inner: int,
    *,
    norm: Norm,
    activation: str,
    gated: bool = False,
    mlp: tuple[str, ...] = ("fc1", "fc2"),
    conv_bias: bool = False,
    positions: int = 0,
) -> tuple[list[Stage], int]:
    """Qwen's tower: patches of two frames, rotary positions, attention within an image; stages and
    patches of an image."""
    heads, patch = v.size("num_heads", 16), v.size("patch_size", 14)
    v.divides("hidden_size", "num_heads", width, heads)
    side = v.size("image_size", DEFAULT_SIDE) // patch
    layer = TowerLayer(
        attention=VisionAttention(heads=heads, size=width // heads),
        width=width,
        inner=inner,
        norm=norm,
        activation=v.activation("hidden_act", activation),
        gated=gated,
        names=("norm1", "norm2"),
        scope="attn",
        output="proj",
        mlp=("gate_proj", "up_proj", "down_proj") if gated else mlp,
    )
    first = Patches(
        length=side * side,
        width=width,
        patch=(v.size("temporal_patch_size", 2), patch, patch),
        channels=v.size("in_channels", 3),
        bias=conv_bias,
        convolution="patch_embed.proj",
        scope="",
        positions=positions,
        table="pos_embed",
        rotary_size=width // heads,
    )
    return [
        Stage(part=first, path="model.visual"),
        Stage(part=layer, count=v.size("depth", 32), path="model.visual.blocks", checkpointed=True),
    ], side * side


def _qwen_merger(v: Config, width: int, out: int, patches: int, *, norm: Norm) -> Stage:
    merged = v.size("spatial_merge_size", 2) ** 2
    part = MlpProjector(
        inputs=width,
        outputs=out,
        tokens=patches // merged,
        inner=width * merged,
        merged=merged,
        norm=norm,
        norm_name="ln_q",
        linears=("mlp.0", "mlp.2"),
    )
    return Stage(part=part, path="model.visual.merger")
