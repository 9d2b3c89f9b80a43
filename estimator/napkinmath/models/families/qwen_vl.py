"""Qwen's vision-language models: towers of packed patches, merged by two by two."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.pictures import AnySize
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.vision_language import (
    DEFAULT_SIDE,
    LAYER,
    RMS,
    TEXT,
    joined,
    text_spec,
)
from napkinmath.models.layers.deep_features import AddDeepFeatures, DeepFeatures
from napkinmath.models.layers.norm import Norm
from napkinmath.models.layers.projectors import MlpProjector
from napkinmath.models.layers.vision_towers import (
    Patches,
    TowerLayer,
    VisionAttention,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Least and most area of an image: preprocessor_config.json of Qwen/Qwen2-VL-7B-Instruct and
# Qwen/Qwen2.5-VL-7B-Instruct (min_pixels, max_pixels), of Qwen/Qwen3-VL-8B-Instruct (size).
QWEN2_PIXELS = (3136, 12_845_056)
QWEN3_PIXELS = (65_536, 16_777_216)
FULL_LAYERS = (7, 15, 23, 31)  # Qwen2_5_VLVisionConfig.fullatt_block_indexes
DEEP_LAYERS = (8, 16, 24)  # Qwen3VLVisionConfig.deepstack_visual_indexes


class MergerNames(Record):
    """Names within Qwen 3's mergers."""

    norm: str = "norm"
    linears: tuple[str, str] = ("linear_fc1", "linear_fc2")
    deep: str = "deepstack_merger_list"


def qwen2_vl(c: Config) -> ModelSpec:
    """Qwen2VLForConditionalGeneration (transformers models/qwen2_vl)."""
    v = c.nested("vision_config")
    width = v.size("embed_dim", 1280)
    tower = _qwen_tower(
        v, width, int(width * v.number("mlp_ratio", 4)), norm=LAYER, activation="quick_gelu"
    )
    merger = _qwen_merger(v, width, v.size("hidden_size", 3584), norm=LAYER)
    return joined(c, [*tower, merger], text_spec(c, "qwen2"), "qwen2_vl", returned=())


def qwen2_5_vl(c: Config) -> ModelSpec:
    """Qwen2_5_VLForConditionalGeneration: gated feed-forward with biases, windows of attention in
    most layers (transformers models/qwen2_5_vl)."""
    return windowed_tower(c, "qwen2_5_vl")


def exaone4_5(c: Config) -> ModelSpec:
    """Exaone4_5_ForConditionalGeneration: Qwen 2.5's tower with fewer heads of keys and values
    before EXAONE 4 (transformers models/exaone4_5)."""
    return windowed_tower(c, "exaone4_5", text="exaone4", kv_heads=8)


def windowed_tower(
    c: Config,
    family: str,
    *,
    text: str = "qwen2",
    separate: tuple[str, ...] = (),
    kv_heads: int = 0,
) -> ModelSpec:
    """Qwen 2.5's tower before a text. `separate`: names of linears of q, k and v. `kv_heads`: the
    default of a field that Qwen's tower lacks; 0 for Qwen's own."""
    v = c.nested("vision_config")
    width = v.size("hidden_size", 3584)
    tower = _qwen_tower(
        v,
        width,
        v.size("intermediate_size", 3420),
        norm=RMS,
        activation="silu",
        gated=True,
        separate=separate,
        kv_heads=v.size("num_key_value_heads", kv_heads) if kv_heads else 0,
    )
    merger = _qwen_merger(v, width, v.size("out_hidden_size", 3584), norm=RMS)
    return joined(c, [*tower, merger], text_spec(c, text), family, returned=())


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
    c: Config,
    text: ModelSpec,
    family: str,
    *,
    deep_features: bool = True,
    names: MergerNames = MergerNames(),
) -> ModelSpec:
    """Qwen 3 VL's tower before a text model."""
    v = c.nested("vision_config")
    width = v.size("hidden_size", 1152)
    tower = _qwen_tower(
        v,
        width,
        v.size("intermediate_size", 4304),
        norm=LAYER,
        activation="gelu_pytorch_tanh",
        mlp=("linear_fc1", "linear_fc2"),
        conv_bias=True,
        positions=v.size("num_position_embeddings", 2304),
        limits=QWEN3_PIXELS,
        patch=16,
    )
    merged = v.size("spatial_merge_size", 2) ** 2
    out = v.size("out_hidden_size", 3584)
    merger = MlpProjector(
        inputs=width,
        outputs=out,
        inner=width * merged,
        merged=merged,
        norm=LAYER,
        norm_name=names.norm,
        linears=names.linears,
    )
    depths: tuple[int, ...] = ()
    if deep_features:
        named = "deepstack_visual_indexes" in v
        depths = v.sizes("deepstack_visual_indexes") if named else DEEP_LAYERS
    deep = DeepFeatures(merger=merger.replace(norm_merged=True))
    first, layers = tower
    tower = [first, *_between(layers, depths, deep, f"model.visual.{names.deep}")]
    last = Stage(part=merger, path="model.visual.merger")
    spec = joined(c, [*tower, last], text, family, returned=())
    return spec.replace(stages=tuple(_with_deep_features(spec.stages, len(depths))))


def _between(layers: Stage, after: tuple[int, ...], part: DeepFeatures, path: str) -> list[Stage]:
    """The layers, with a stage of `part` after each of those numbers."""
    found: list[Stage] = []
    done = 0
    for index, number in enumerate(after):
        if number >= layers.count:
            continue
        found.append(layers.replace(count=number + 1 - done))
        found.append(Stage(part=part.replace(index=index), path=f"{path}.{index}"))
        done = number + 1
    rest = layers.count - done
    return [*found, layers.replace(count=rest)] if rest else found


def _with_deep_features(stages: tuple[Stage, ...], count: int) -> Iterator[Stage]:
    """The stages, with features of inner depths added to the image rows of the first text layers'
    outputs."""
    index = 0
    for stage in stages:
        left = stage.count
        while stage.checkpointed and not stage.modality and index < count and left:
            yield stage.replace(count=1)
            yield Stage(part=AddDeepFeatures(index=index), path=TEXT, modality="image")
            index, left = index + 1, left - 1
        if left:
            yield stage.replace(count=left)


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
    limits: tuple[int, int] = QWEN2_PIXELS,
    separate: tuple[str, ...] = (),
    patch: int = 14,
    kv_heads: int = 0,
) -> list[Stage]:
    """Qwen's tower: patches of two frames, rotary positions, attention within an image."""
    heads, patch = v.size("num_heads", 16), v.size("patch_size", patch)
    v.divides("hidden_size", "num_heads", width, heads)
    low, high = limits
    pictures = AnySize(
        side=v.size("image_size", DEFAULT_SIDE),
        patch=patch,
        merge=v.size("spatial_merge_size", 2),
        low=low,
        high=high,
    )
    depth = v.size("depth", 32)
    v.divides("num_heads", "num_key_value_heads", heads, kv_heads or heads)
    attention = VisionAttention(heads=heads, size=width // heads, names=separate, kv_heads=kv_heads)
    layer = TowerLayer(
        attention=attention,
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
        pictures=pictures,
        width=width,
        patch=(v.size("temporal_patch_size", 2), patch, patch),
        channels=v.size("in_channels", 3),
        bias=conv_bias,
        convolution="patch_embed.proj",
        scope="",
        positions=positions,
        table="pos_embed",
        interpolated=bool(positions),
        leaf=not positions,
        windowed=gated,
        rotary_size=width // heads,
        packed=True,
    )
    whole = Stage(part=layer, path="model.visual.blocks", checkpointed=True)
    if not gated:
        return [Stage(part=first, path="model.visual"), whole.replace(count=depth)]
    window = (v.size("window_size", 112) // patch) ** 2
    within = layer.replace(attention=attention.replace(window=window))
    full = v.layer_indices("fullatt_block_indexes", depth, FULL_LAYERS)
    layers = [whole if i in full else whole.replace(part=within) for i in range(depth)]
    return [Stage(part=first, path="model.visual"), *runs(layers)]


def _qwen_merger(v: Config, width: int, out: int, *, norm: Norm) -> Stage:
    merged = v.size("spatial_merge_size", 2) ** 2
    part = MlpProjector(
        inputs=width,
        outputs=out,
        inner=width * merged,
        merged=merged,
        norm=norm,
        norm_name="ln_q",
        linears=("mlp.0", "mlp.2"),
    )
    return Stage(part=part, path="model.visual.merger")
