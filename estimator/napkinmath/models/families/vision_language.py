"""Vision-language models: a vision tower and a projector before a text model that another family
reads."""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.tape import Tape
from napkinmath.models.families import read_config
from napkinmath.models.families.config import Config
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import (
    LinearProjector,
    MlpProjector,
    Patches,
    PooledProjector,
    TowerLayer,
    TowerNorm,
    VisionAttention,
    WithImages,
)

LAYER, RMS = Norm(kind=NormKind.LAYER), Norm()
TOWER, PROJECTOR, TEXT = "model.vision_tower", "model.multi_modal_projector", "model.language_model"
DEFAULT_SIDE = 448  # pixels, for towers that take images of any size and name none


def text_spec(c: Config, model_type: str = "", **defaults: object) -> ModelSpec:
    """The text model of `text_config`, read by its own family; `model_type` where the nested one is
    a relative's."""
    text = c.nested("text_config")
    values = {**defaults, **text.values}
    if "tie_word_embeddings" in text or "tie_word_embeddings" in c:
        values["tie_word_embeddings"] = text.flag("tie_word_embeddings") or c.flag(
            "tie_word_embeddings"
        )
    if model_type:
        values["model_type"] = model_type
    return read_config(values, name=c.name, source=c.source)


def image(stages: list[Stage]) -> list[Stage]:
    """Stages that run only where there are images; the last publishes the features."""
    marked = [stage.replace(modality=stage.modality or "image") for stage in stages]
    marked[-1] = marked[-1].replace(publishes="image features")
    return marked


def joined(c: Config, tower: list[Stage], text: ModelSpec, family: str) -> ModelSpec:
    """The tower's stages, then the text's under the joint model's path, its entrance taking image
    features."""
    stages = image(tower)
    for stage in text.stages:
        path = (
            TEXT + stage.path.removeprefix("model")
            if stage.path.startswith("model")
            else stage.path
        )
        part: Part = stage.part
        if stage is text.stages[0]:
            if isinstance(part, TokenEmbedding) and family.startswith("qwen"):
                part = part.replace(tables_per_row=True)
            part = WithImages(text=part)
        elif isinstance(part, CausalLmHead):
            part = part.replace(
                norm_name=part.norm_name.replace("model.", f"{TEXT}."),
                tied_to=part.tied_to.replace("model.", f"{TEXT}.", 1),
            )
        stages.append(stage.replace(part=part, path=path))
    return c.spec(tuple(stages), dict(text.symbols), family=family)


def llava(c: Config) -> ModelSpec:
    """LlavaForConditionalGeneration over a CLIP or Pixtral tower (transformers models/llava)."""
    vision, text = c.nested("vision_config"), text_spec(c)
    width, bias = vision.size("hidden_size"), c.flag("multimodal_projector_bias", True)
    projector = MlpProjector(
        inputs=width,
        outputs=dict(text.symbols)["h"],
        tokens=0,
        bias=bias,
        activation=c.activation("projector_hidden_act", "gelu"),
    )
    if vision.text("model_type", "clip_vision_model") == "pixtral":
        tower, tokens = pixtral(vision)
    else:
        tower, tokens = clip(vision, last=c.whole("vision_feature_layer", -2))
        projector = projector.replace(
            drop_first=c.text("vision_feature_select_strategy", "default") == "default"
        )
    return joined(
        c, [*tower, Stage(part=projector.replace(tokens=tokens), path=PROJECTOR)], text, "llava"
    )


def mistral3(c: Config) -> ModelSpec:
    """Mistral3ForConditionalGeneration: a Pixtral tower, squares of patches merged (transformers
    models/mistral3)."""
    vision = c.nested("vision_config")
    text = text_spec(
        c,
        (
            "mistral"
            if c.nested("text_config").text("model_type", "mistral") in ("mistral", "ministral3")
            else ""
        ),
    )
    tower, tokens = pixtral(vision)
    merged = c.size("spatial_merge_size", 2) ** 2
    projector = MlpProjector(
        inputs=vision.size("hidden_size"),
        outputs=dict(text.symbols)["h"],
        tokens=tokens // merged,
        bias=c.flag("multimodal_projector_bias"),
        activation=c.activation("projector_hidden_act", "gelu"),
        norm=RMS,
        merged=merged,
        merger="patch_merger.merging_layer",
    )
    return joined(c, [*tower, Stage(part=projector, path=PROJECTOR)], text, "mistral3")


def clip(v: Config, *, last: int) -> tuple[list[Stage], int]:
    """CLIP's tower up to the chosen hidden states; layers after them run but get no gradient.
    Returns stages and patches."""
    width, heads, layers = (
        v.size("hidden_size", 768),
        v.size("num_attention_heads", 12),
        v.size("num_hidden_layers", 12),
    )
    patches = (v.size("image_size", 224) // v.size("patch_size", 32)) ** 2
    used = layers + 1 + last if last < 0 else last
    layer = _plain_layer(v, width, heads, "quick_gelu")
    first = Patches(
        length=patches,
        width=width,
        patch=(v.size("patch_size", 32),) * 2,
        token="class_embedding",
        positions=patches + 1,
        norm=LAYER,
        norm_name="pre_layrnorm",
    )
    tower = [
        Stage(part=first, path=TOWER),
        Stage(part=layer, count=used, path=f"{TOWER}.encoder.layers", checkpointed=True),
    ]
    if used < layers:  # run for nothing: what they make is dropped with the call
        tower.append(
            Stage(part=layer, count=layers - used, path=f"{TOWER}.encoder.layers", modality="idle")
        )
    return [
        *tower,
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=TOWER, modality="idle"),
    ], patches


def _plain_layer(v: Config, width: int, heads: int, activation: str) -> TowerLayer:
    v.divides("hidden_size", "num_attention_heads", width, heads)
    attention = BidirectionalAttention(
        names=("q_proj", "k_proj", "v_proj"),
        heads=heads,
        size=width // heads,
        dropout=v.number("attention_dropout", 0.0),
        fp32_softmax=True,
    )
    return TowerLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 3072),
        activation=v.activation("hidden_act", activation),
    )


def siglip(v: Config) -> tuple[list[Stage], int]:
    """SigLIP's tower (without the pooling head); stages and patches."""
    width, heads, layers = (
        v.size("hidden_size", 768),
        v.size("num_attention_heads", 12),
        v.size("num_hidden_layers", 12),
    )
    patches = (v.size("image_size", 224) // v.size("patch_size", 16)) ** 2
    first = Patches(
        length=patches,
        width=width,
        patch=(v.size("patch_size", 16),) * 2,
        bias=True,
        positions=patches,
    )
    layer = _plain_layer(v, width, heads, "gelu_pytorch_tanh")
    return [
        Stage(part=first, path=TOWER),
        Stage(part=layer, count=layers, path=f"{TOWER}.encoder.layers", checkpointed=True),
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=TOWER),
    ], patches


def pixtral(v: Config) -> tuple[list[Stage], int]:
    """Pixtral's tower: RMS norms, rotary positions in two dimensions, gated feed-forward; stages
    and patches."""
    width, heads, layers = (
        v.size("hidden_size", 1024),
        v.size("num_attention_heads", 16),
        v.size("num_hidden_layers", 24),
    )
    patch = v.size("patch_size", 16)
    patches = (v.size("image_size", 1024) // patch) ** 2
    attention = BidirectionalAttention(
        names=("q_proj", "k_proj", "v_proj"),
        heads=heads,
        size=width // heads,
        bias=(False, False, False),
        fp32_softmax=True,
        rotary=True,
    )
    layer = TowerLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 4096),
        norm=RMS,
        activation=v.activation("hidden_act", "gelu"),
        gated=True,
        mlp_bias=False,
        output_bias=False,
        names=("attention_norm", "ffn_norm"),
        scope="attention",
        output="o_proj",
        mlp=("gate_proj", "up_proj", "down_proj"),
        mlp_scope="feed_forward",
    )
    first = Patches(
        length=patches,
        width=width,
        patch=(patch, patch),
        convolution="patch_conv",
        scope="",
        norm=RMS,
        norm_name="ln_pre",
        rotary_size=width // heads,
    )
    return [
        Stage(part=first, path=TOWER),
        Stage(part=layer, count=layers, path=f"{TOWER}.transformer.layers", checkpointed=True),
    ], patches


def gemma3(c: Config) -> ModelSpec:
    """Gemma3ForConditionalGeneration: SigLIP, pooling to `mm_tokens_per_image` rows (transformers
    models/gemma3)."""
    vision, text = c.nested("vision_config"), text_spec(c, "gemma3_text")
    tower, _ = siglip(vision)
    projector = PooledProjector(
        inputs=vision.size("hidden_size"),
        outputs=dict(text.symbols)["h"],
        tokens=c.size("mm_tokens_per_image", 256),
    )
    return joined(c, [*tower, Stage(part=projector, path=PROJECTOR)], text, "gemma3")


def paligemma(c: Config) -> ModelSpec:
    """PaliGemmaForConditionalGeneration: SigLIP and one linear (transformers models/paligemma)."""
    tower, _ = siglip(c.nested("vision_config"))
    text = text_spec(c)
    width = c.nested("vision_config").size(
        "projection_dim", c.size("projection_dim", dict(text.symbols)["h"])
    )
    return joined(
        c, [*tower, Stage(part=LinearProjector(outputs=width), path=PROJECTOR)], text, "paligemma"
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


def qwen3_tower(c: Config, text: ModelSpec, family: str) -> ModelSpec:
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
    depths = len(v.sizes("deepstack_visual_indexes")) if "deepstack_visual_indexes" in v else 3
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
