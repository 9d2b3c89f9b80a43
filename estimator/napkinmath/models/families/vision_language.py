"""Vision-language models: a vision tower and a projector before a text model that another family
reads."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.pictures import Fitted, Pictures, Square
from napkinmath.models.families import read_config
from napkinmath.models.families.config import Config
from napkinmath.models.families.nested import as_nested
from napkinmath.models.layers.embedding import FEATURES, TokenEmbedding
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.gemma4 import Gemma4Embedding, WithGemma4Images
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.idle import pooling_head
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.projectors import LinearProjector, MlpProjector, PooledProjector
from napkinmath.models.layers.vision_towers import (
    BETWEEN,
    BLOCKS,
    ENTERED,
    PIXELS,
    REAL_TILES,
    WORDS,
    Patches,
    TowerLayer,
    TowerNorm,
    WithImages,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LAYER, RMS = Norm(kind=NormKind.LAYER), Norm()
TOWER, PROJECTOR, TEXT = "model.vision_tower", "model.multi_modal_projector", "model.language_model"
GEMMA3_MARKS = 4  # two blank lines around <start_of_image> and <end_of_image> (Gemma3Processor)
DEFAULT_SIDE = 448  # pixels, for towers that take images of any size and name none


class Seen(str, Enum):
    """Which layers' masks let the tokens of an image see those after them in the same image."""

    NOT_AHEAD = "not ahead"
    EVERYWHERE = "everywhere"
    IN_WINDOWS = "in windows"
    """In the layers that have one (Gemma 4)."""

    def windows(self, of_text: tuple[int, ...]) -> tuple[int, ...]:
        """Windows of those layers, 0 for none."""
        if self is Seen.NOT_AHEAD:
            return ()
        return of_text if self is Seen.IN_WINDOWS else (0, *of_text)


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
    return as_nested(read_config(values, name=c.name, source=c.source), c.text("model_type", ""))


def tied_unless_said(c: Config) -> Config:
    """The config of a joint model whose class ties the head by default, whatever its text says."""
    return Config({"tie_word_embeddings": True, **c.values}, c.name, c.source)


def image(stages: list[Stage], *, returned: tuple[str, ...] = (FEATURES,)) -> list[Stage]:
    """Stages that run only where there are images; the last publishes the features. `returned`:
    which of them are among the model's outputs (`image_hidden_states`)."""
    marked = [stage.replace(modality=stage.modality or "image") for stage in stages]
    closes = (PIXELS, BETWEEN, REAL_TILES)
    marked[-1] = marked[-1].replace(publishes=FEATURES, closes=closes, returned=returned)
    return marked


def joined(
    c: Config,
    tower: list[Stage],
    text: ModelSpec,
    family: str,
    *,
    seen: Seen = Seen.NOT_AHEAD,
    text_path: str = TEXT,
    returned: tuple[str, ...] = (FEATURES,),
    idle: bool = False,
) -> ModelSpec:
    """The text's embeddings, the tower's stages, the embeddings with image features in their
    places, and the text's layers, all under the joint model's path.

    `returned`: which features are among the model's outputs. `seen`: where the tokens of an image see each other. `idle`: the tower never runs, so that
    nothing waits for its features.
    """
    first, *rest = text.stages
    embedding = first.part
    if isinstance(embedding, TokenEmbedding) and family.startswith("qwen"):
        embedding = embedding.replace(tables_per_row=True)
    if isinstance(embedding, TokenEmbedding) and seen is not Seen.NOT_AHEAD:
        embedding = embedding.replace(masks_see_images=True)
    path = _joint_path(first.path, text_path)
    windows = embedding.windows if isinstance(embedding, TokenEmbedding) else ()
    whole = WithImages(seen_whole=seen.windows(windows))
    if isinstance(embedding, Gemma4Embedding):
        whole = WithGemma4Images(seen_whole=whole.seen_whole, text=embedding)
    if idle:
        stages = [first.replace(path=path), *tower]
    else:
        stages = [
            first.replace(part=embedding, path=path, publishes=WORDS, waits=True),
            *image(tower, returned=returned),
            Stage(part=whole, path=path.rpartition(".")[0], modality="image"),
        ]
    for stage in rest:
        part: Part = stage.part
        if isinstance(part, CausalLmHead):
            part = part.replace(
                norm_name=part.norm_name.replace("model.", f"{text_path}."),
                tied_to=part.tied_to.replace("model.", f"{text_path}.", 1),
            )
        stages.append(stage.replace(part=part, path=_joint_path(stage.path, text_path)))
    return c.spec(tuple(stages), dict(text.symbols), family=family)


def _joint_path(path: str, text_path: str) -> str:
    return text_path + path.removeprefix("model") if path.startswith("model") else path


def llava(c: Config) -> ModelSpec:
    """LlavaForConditionalGeneration over a CLIP or Pixtral tower (transformers models/llava)."""
    vision, text = c.nested("vision_config"), text_spec(c)
    width, bias = vision.size("hidden_size"), c.flag("multimodal_projector_bias", True)
    projector = MlpProjector(
        inputs=width,
        outputs=dict(text.symbols)["h"],
        bias=bias,
        activation=c.activation("projector_hidden_act", "gelu"),
    )
    if vision.text("model_type", "clip_vision_model") == "pixtral":
        tower = pixtral(vision)
    else:
        tower = clip(vision, last=c.whole("vision_feature_layer", -2))
        projector = projector.replace(
            drop_first=c.text("vision_feature_select_strategy", "default") == "default"
        )
    return joined(c, [*tower, Stage(part=projector, path=PROJECTOR)], text, "llava")


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
        tie_word_embeddings=True,
    )
    merge = c.size("spatial_merge_size", 2)
    projector = merging_projector(vision, text, merge).replace(
        bias=c.flag("multimodal_projector_bias"),
        activation=c.activation("projector_hidden_act", "gelu"),
    )
    tower = pixtral(vision, merge)
    return joined(c, [*tower, Stage(part=projector, path=PROJECTOR)], text, "mistral3")


def merging_projector(v: Config, text: ModelSpec, merge: int) -> MlpProjector:
    """Mistral 3's projector: a norm, squares of patches merged, two linears."""
    return MlpProjector(
        inputs=v.size("hidden_size", 1024),
        outputs=dict(text.symbols)["h"],
        bias=False,
        norm=RMS,
        merged=merge**2,
        merger="patch_merger.merging_layer",
    )


def clip(
    v: Config, *, last: int, pictures: Pictures | None = None, path: str = TOWER
) -> list[Stage]:
    """CLIP's tower up to the chosen hidden states; layers after them run but get no gradient.
    `pictures`: where it gets tiles of an image, joined from an axis of their own."""
    width, heads, layers = (
        v.size("hidden_size", 768),
        v.size("num_attention_heads", 12),
        v.size("num_hidden_layers", 12),
    )
    stacked = pictures is not None
    if pictures is None:
        pictures = Square(side=v.size("image_size", 224), patch=v.size("patch_size", 32))
    used = layers + 1 + last if last < 0 else last
    if not 0 <= used <= layers:
        raise InputError(
            f"config field vision_feature_layer={last} is no layer of a tower of {layers}; LLaVA"
            " has -2"
        )
    layer = plain_layer(v, width, heads, "quick_gelu")
    first = Patches(
        pictures=pictures,
        width=width,
        patch=(pictures.patch,) * 2,
        token="class_embedding",
        stacked=stacked,
        positions=(pictures.side // pictures.patch) ** 2 + 1,
        norm=LAYER,
        norm_name="pre_layrnorm",
    )
    tower = [
        Stage(part=first, path=path),
        Stage(part=layer, count=used, path=f"{path}.encoder.layers", checkpointed=True),
    ]
    if used < layers:  # run for nothing: what they make is dropped with the call
        tower.append(
            Stage(part=layer, count=layers - used, path=f"{path}.encoder.layers", modality="idle")
        )
    return [
        *tower,
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=path, modality="idle"),
    ]


def plain_layer(
    v: Config, width: int, heads: int, activation: str, *, mask: str = ""
) -> TowerLayer:
    """A layer of CLIP's and SigLIP's towers. `mask`: the name of one, where padding needs it."""
    v.divides("hidden_size", "num_attention_heads", width, heads)
    attention = BidirectionalAttention(
        names=("q_proj", "k_proj", "v_proj"),
        heads=heads,
        size=width // heads,
        dropout=v.number("attention_dropout", 0.0),
        fp32_softmax=True,
        mask=mask,
    )
    return TowerLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 3072),
        activation=v.activation("hidden_act", activation),
    )


def siglip(
    v: Config,
    *,
    pictures: Pictures | None = None,
    stacked: bool = False,
    path: str = TOWER,
    **places: int,
) -> list[Stage]:
    """SigLIP's tower; `places` are fields of its Square, where the images are no other `pictures`.
    `stacked`: tiles are joined from an axis of their own."""
    width, heads, layers = (
        v.size("hidden_size", 768),
        v.size("num_attention_heads", 12),
        v.size("num_hidden_layers", 12),
    )
    if pictures is None:
        side, patch = v.size("image_size", 224), v.size("patch_size", 16)
        pictures = Square(side=side, patch=patch, **places)
    first = Patches(
        pictures=pictures,
        width=width,
        patch=(pictures.patch,) * 2,
        bias=True,
        stacked=stacked,
        positions=(pictures.side // pictures.patch) ** 2,
        held=True,
    )
    layer = plain_layer(v, width, heads, "gelu_pytorch_tanh")
    tower = [
        Stage(part=first, path=path),
        Stage(
            part=layer,
            count=layers,
            path=f"{path}.encoder.layers",
            checkpointed=True,
            closes=(ENTERED,),
        ),
    ]
    if v.flag("vision_use_head", True):
        head = pooling_head(width, v.size("intermediate_size", 3072))
        tower.append(Stage(part=head, path=f"{path}.head", modality="idle"))
    return [*tower, Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=path)]


def pixtral(v: Config, merge: int = 1, **own: Any) -> list[Stage]:
    """Pixtral's tower: RMS norms, rotary positions in two dimensions, gated feed-forward. `own`:
    its `path` and `pictures`, where they are not Mistral 3's."""
    width, heads, layers = (
        v.size("hidden_size", 1024),
        v.size("num_attention_heads", 16),
        v.size("num_hidden_layers", 24),
    )
    patch = v.size("patch_size", 16)
    attention = BidirectionalAttention(
        names=("q_proj", "k_proj", "v_proj"),
        heads=heads,
        size=width // heads,
        bias=(False, False, False),
        fp32_softmax=True,
        rotary=True,
        mask=BLOCKS,
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
    path: str = own.get("path", TOWER)
    fitted = Fitted(side=v.size("image_size", 1024), patch=patch, merge=merge)
    first = Patches(
        pictures=own.get("pictures", fitted),
        width=width,
        patch=(patch, patch),
        convolution="patch_conv",
        scope="",
        norm=RMS,
        norm_name="ln_pre",
        rotary_size=width // heads,
        packed=True,
        block_mask=True,
        leaf=True,
    )
    return [
        Stage(part=first, path=path),
        Stage(
            part=layer,
            count=layers,
            path=f"{path}.transformer.layers",
            checkpointed=True,
            closes=(BLOCKS,),
        ),
    ]


def deepseek_vl(c: Config) -> ModelSpec:
    """DeepseekVLForConditionalGeneration: SigLIP and two linears (transformers
    models/deepseek_vl)."""
    v, text = c.nested("vision_config"), text_spec(tied_unless_said(c))
    if (kind := v.text("model_type", "siglip_vision_model")) != "siglip_vision_model":
        raise InputError(
            f"config field model_type={shown(kind)} of vision_config has no rules in a deepseek_vl;"
            " give siglip_vision_model"
        )
    aligner = MlpProjector(
        inputs=v.size("hidden_size", 768),
        outputs=dict(text.symbols)["h"],
        linears=("linear1", "linear2"),
    )
    tower = siglip(v, path="model.vision_model")
    return joined(c, [*tower, Stage(part=aligner, path="model.aligner")], text, "deepseek_vl")


def gemma3(c: Config) -> ModelSpec:
    """Gemma3ForConditionalGeneration: SigLIP, pooling to `mm_tokens_per_image` rows (transformers
    models/gemma3)."""
    vision, text = c.nested("vision_config"), text_spec(c, "gemma3_text")
    tokens = c.size("mm_tokens_per_image", 256)
    tower = siglip(vision, tokens=tokens, marks=GEMMA3_MARKS)
    projector = PooledProjector(
        inputs=vision.size("hidden_size"), outputs=dict(text.symbols)["h"], tokens=tokens
    )
    stages = [*tower, Stage(part=projector, path=PROJECTOR)]
    return joined(c, stages, text, "gemma3", seen=Seen.EVERYWHERE)


def paligemma(c: Config) -> ModelSpec:
    """PaliGemmaForConditionalGeneration: SigLIP and one linear (transformers models/paligemma)."""
    tower = siglip(c.nested("vision_config"))
    text = text_spec(c, tie_word_embeddings=True)
    width = c.nested("vision_config").size(
        "projection_dim", c.size("projection_dim", dict(text.symbols)["h"])
    )
    stages = [*tower, Stage(part=LinearProjector(outputs=width), path=PROJECTOR)]
    return joined(c, stages, text, "paligemma", seen=Seen.EVERYWHERE)
