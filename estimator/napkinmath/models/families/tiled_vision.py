"""Vision-language models that cut an image into tiles of one size: Idefics 3 and SmolVLM, InternVL,
LLaVA-NeXT."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.values import listed
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.tiled_pictures import Crops, Pinpoints, ScaledPinpoints, SplitTiles
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import (
    LAYER,
    PROJECTOR,
    RMS,
    TOWER,
    clip,
    joined,
    plain_layer,
    siglip,
    text_spec,
)
from napkinmath.models.families.vit import pair
from napkinmath.models.layers.projectors import MlpProjector
from napkinmath.models.layers.tiles import (
    LAST,
    PACKED,
    ClassTokenPatches,
    Folded,
    PackedTiles,
    RealTiles,
    ScaledTowerLayer,
    WholeNormAttention,
)
from napkinmath.models.layers.vision_towers import TowerNorm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VISION = "model.vision_model"
LONGEST = 4
"""Tiles along the longest side that an image is scaled to: `size` of Idefics3ImageProcessor, and of
the preprocessor_config.json of the published models (1456 of 364, 1536 of 384, 2048 of 512)."""
ONEVISION_TILES = 6  # of a side of the largest canvas: image_grid_pinpoints of LlavaOnevisionConfig
# image_grid_pinpoints of LlavaNextConfig, (height, width)
CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def idefics3(c: Config) -> ModelSpec:
    """Idefics3ForConditionalGeneration and SmolVLMForConditionalGeneration (transformers
    models/idefics3, models/smolvlm)."""
    v, folded = c.nested("vision_config"), c.size("scale_factor", 2) ** 2
    width, heads = v.size("hidden_size", 1152), v.size("num_attention_heads", 16)
    side, patch = v.size("image_size", 224), v.size("patch_size", 32)
    count = (side // patch) ** 2
    if count % folded:
        raise InputError(
            f"config field scale_factor={shown(c.size('scale_factor', 2))} does not fold the"
            f" {count} patches of a tile into whole squares"
        )
    first = RealTiles(
        pictures=SplitTiles(
            side=side, patch=patch, longest=LONGEST * side, per_tile=count // folded
        ),
        width=width,
        patch=(patch, patch),
        channels=v.size("num_channels", 3),
        positions=count,
    )
    text = text_spec(c)
    connector = Folded(
        merged=folded,
        norm="vision_model.post_layernorm",
        projection="connector.modality_projection.proj",
        outputs=dict(text.symbols)["h"],
    )
    tower = [
        Stage(part=first, path=VISION),
        Stage(
            part=plain_layer(v, width, heads, "gelu_pytorch_tanh"),
            count=v.size("num_hidden_layers", 12),
            path=f"{VISION}.encoder.layers",
            checkpointed=True,
        ),
        Stage(part=connector, path="model"),
    ]
    family = str(c.values.get("model_type", "idefics3"))
    returned = (PACKED, LAST)  # the tower's whole output is
    return joined(c, tower, text, family, text_path="model.text_model", returned=returned)


def internvl(c: Config) -> ModelSpec:
    """InternVLForConditionalGeneration, the `-hf` form of InternVL (transformers
    models/internvl)."""
    return _folded(c, text_spec(c, tie_word_embeddings=True), _internvl_tower)


def qianfan_ocr(c: Config) -> ModelSpec:
    """QianfanOCRForConditionalGeneration: InternVL over Qwen 3, whose tower leaves out layers of some
    images (transformers models/qianfan_ocr)."""
    return _folded(c, text_spec(c, "qwen3", tie_word_embeddings=False), _qianfan_tower)


def _folded(
    c: Config, text: ModelSpec, tower_of: Callable[[Config, Crops], list[Stage]]
) -> ModelSpec:
    if c.whole("vision_feature_layer", -1) != -1:
        raise InputError(
            f"config field vision_feature_layer={shown(c.values['vision_feature_layer'])} has no"
            " rules: features of the last layer alone, -1"
        )
    v = c.nested("vision_config")
    ratio = c.number("downsample_ratio", 0.5)
    merged = round(1 / ratio) ** 2 if 0.01 <= ratio <= 1 else 0
    (side, _), (patch, _) = pair(v, "image_size", 448), pair(v, "patch_size", 14)
    count = (side // patch) ** 2
    if not merged or count % merged:
        raise InputError(
            f"config field downsample_ratio={shown(ratio)} does not fold the {count} patches of a"
            " tile into whole squares; InternVL has 0.5"
        )
    outputs = dict(text.symbols)["h"]
    projector = MlpProjector(
        inputs=v.size("hidden_size", 1024) * merged,
        outputs=outputs,
        activation=c.activation("projector_hidden_act", "gelu"),
        norm=LAYER,
        norm_name="layer_norm",
    )
    folded = Folded(
        merged=merged,
        drop_first=c.text("vision_feature_select_strategy", "default") == "default",
    )
    stages = [
        *tower_of(v, Crops(side=side, patch=patch, per_tile=count // merged)),
        Stage(part=folded, path="model"),
        Stage(part=projector, path=PROJECTOR),
    ]
    return joined(c, stages, text, str(c.values.get("model_type", "internvl")))


def _qianfan_tower(v: Config, pictures: Crops) -> list[Stage]:
    """InternVL's, where a rate that grows from 0 says how many images a layer leaves out."""
    own = Config({"attention_bias": True, **v.values}, v.name, v.source)
    if v.probability("projection_dropout"):
        raise InputError(
            "config field projection_dropout of vision_config has no rules in a qianfan_ocr; give 0"
        )
    first, layers, *norm = _internvl_tower(own, pictures)
    assert isinstance(layers.part, ScaledTowerLayer)
    part = layers.part.replace(holds_scaled=False)
    layers = layers.replace(part=part, path=f"{TOWER}.layers")
    if layers.count < 2 or not v.probability("drop_path_rate", 0.1):
        return [first, layers, *norm]
    later = layers.replace(part=part.replace(drops_samples=True), count=layers.count - 1)
    return [first, layers.replace(count=1), later, *norm]


def _internvl_tower(v: Config, pictures: Crops) -> list[Stage]:
    width, heads = v.size("hidden_size", 1024), v.size("num_attention_heads", 16)
    v.divides("hidden_size", "num_attention_heads", width, heads)
    places = (pictures.side // pictures.patch) ** 2 + 1
    learned = v.flag("use_absolute_position_embeddings", True)
    first = ClassTokenPatches(
        pictures=pictures,
        width=width,
        patch=(pictures.patch,) * 2,
        channels=v.size("num_channels", 3),
        positions=places if learned else 0,
    )
    biased = v.flag("attention_bias")
    attention = WholeNormAttention(
        names=("q_proj", "k_proj", "v_proj"),
        heads=heads,
        size=width // heads,
        bias=(biased, biased, biased),
        dropout=v.probability("attention_dropout"),
        normed=v.flag("use_qk_norm"),
    )
    layer = ScaledTowerLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 4096),
        norm=RMS if v.text("norm_type", "layer_norm") == "rms_norm" else LAYER,
        activation=v.activation("hidden_act", "gelu"),
        names=("layernorm_before", "layernorm_after"),
        scope="attention",
        output="projection_layer",
        dropout=v.probability("hidden_dropout_prob"),
    )
    tower = [
        Stage(part=first, path=TOWER),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 24),
            path=f"{TOWER}.encoder.layer",
            checkpointed=True,
        ),
    ]
    if not v.flag("use_mean_pooling", True):
        tower.append(Stage(part=TowerNorm(norm=LAYER, name="layernorm"), path=TOWER))
    return tower


def llava_next(c: Config) -> ModelSpec:
    """LlavaNextForConditionalGeneration over a CLIP tower (transformers models/llava_next)."""
    v, text = c.nested("vision_config"), text_spec(c)
    if v.text("model_type", "clip_vision_model") != "clip_vision_model":
        raise InputError(
            f"config field model_type={shown(v.values['model_type'])} of vision_config has no rules"
            " in a llava_next; give clip_vision_model"
        )
    pictures = Pinpoints(
        side=v.size("image_size", 224), patch=v.size("patch_size", 32), canvases=_canvases(c)
    )
    projector = MlpProjector(
        inputs=v.size("hidden_size", 768),
        outputs=dict(text.symbols)["h"],
        bias=c.flag("multimodal_projector_bias", True),
        activation=c.activation("projector_hidden_act", "gelu"),
        drop_first=c.text("vision_feature_select_strategy", "default") == "default",
    )
    stages = [
        *clip(v, last=c.whole("vision_feature_layer", -2), pictures=pictures),
        Stage(part=projector, path=PROJECTOR),
        Stage(part=PackedTiles(pictures=pictures), path="model"),
    ]
    return joined(c, stages, text, str(c.values.get("model_type", "llava_next")))


def llava_onevision(c: Config) -> ModelSpec:
    """LlavaOnevisionForConditionalGeneration over a SigLIP tower, whose last layer is read before the
    norm (transformers models/llava_onevision)."""
    v, text = c.nested("vision_config"), text_spec(c)
    limit = c.text("vision_aspect_ratio", "anyres_max_9")
    most = limit.removeprefix("anyres_max_")
    for field, own in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")):
        if (given := c.values.get(field, own)) != own:
            raise InputError(
                f"config field {field}={shown(given)} has no rules; LLaVA-OneVision has {own}"
            )
    if v.text("model_type", "siglip_vision_model") != "siglip_vision_model" or not most.isdecimal():
        raise InputError(
            "a llava_onevision has rules with a siglip_vision_model and vision_aspect_ratio"
            f" anyres_max_9 (or another number), not with {shown(v.values.get('model_type'))} and"
            f" {shown(limit)}"
        )
    side, patch = v.size("image_size", 384), v.size("patch_size", 14)
    steps = [side * n for n in range(1, ONEVISION_TILES + 1)]
    every = tuple((tall, wide) for tall in steps for wide in steps)
    pictures = ScaledPinpoints(side=side, patch=patch, canvases=_canvases(c, every), most=int(most))
    projector = MlpProjector(
        inputs=v.size("hidden_size", 1152),
        outputs=dict(text.symbols)["h"],
        bias=c.flag("multimodal_projector_bias", True),
        activation=c.activation("projector_hidden_act", "gelu"),
    )
    *tower, norm = siglip(v, pictures=pictures, stacked=True)
    stages = [
        *tower,
        norm.replace(modality="idle"),
        Stage(part=projector, path=PROJECTOR),
        Stage(part=PackedTiles(pictures=pictures), path="model"),
    ]
    return joined(c, stages, text, "llava_onevision")


def _canvases(
    c: Config, default: tuple[tuple[int, int], ...] = CANVASES
) -> tuple[tuple[int, int], ...]:
    """(height, width) in pixels of each canvas that an image may be laid on."""
    name = "image_grid_pinpoints"
    given = c.values.get(name)
    if given is None:
        return default
    found = [Config({name: one}, c.name, c.source).sizes(name) for one in listed(given)]
    if not found or any(len(one) != 2 for one in found):
        raise InputError(
            f"config field {name}={shown(given)} is no list of [height, width]; LLaVA-NeXT has"
            " [[336, 672], [672, 336], [672, 672]]"
        )
    return tuple((one[0], one[1]) for one in found)
