"""BLIP-2: a vision tower, a Q-Former and a text model, OPT or T5."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.pictures import Square
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.vision_language import LAYER, image, text_spec
from napkinmath.models.families.vit import pair
from napkinmath.models.layers.blip import (
    STATES,
    BlipAttention,
    BlipPatches,
    QFormerLayer,
    Queries,
)
from napkinmath.models.layers.embedding import FEATURES
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.positions import PositionedEmbedding
from napkinmath.models.layers.projectors import LinearProjector
from napkinmath.models.layers.t5 import T5Embedding, T5Head
from napkinmath.models.layers.vision_towers import TowerLayer, TowerNorm

TOWER, QFORMER, TEXT = "vision_model", "qformer", "language_model"
TEXTS = ("opt", "t5")


def blip_2(c: Config) -> ModelSpec:
    """Blip2ForConditionalGeneration over OPT or T5 (transformers models/blip_2): the tower runs
    before the text's embeddings."""
    kind = c.nested("text_config").text("model_type", "opt")
    if kind not in TEXTS:
        raise InputError(
            f"config field model_type={shown(kind)} of text_config has no rules in a blip-2; give"
            f" {' or '.join(TEXTS)}, or use `estimate trace`"
        )
    text = text_spec(c, kind)
    projector = LinearProjector(outputs=dict(text.symbols)["h"], name="language_projection")
    tower = image([*_tower(c), *_qformer(c), Stage(part=projector)], returned=(STATES, FEATURES))
    nested = (one.replace(part=_inside(one.part), path=_nested(one.path)) for one in text.stages)
    return c.spec((*tower, *nested), dict(text.symbols), family="blip-2")


def _nested(path: str) -> str:
    return f"{TEXT}.{path}" if path else TEXT


def _inside(part: Part) -> Part:
    """A part of the text model inside the joint one."""
    if isinstance(part, PositionedEmbedding):
        return part.replace(around_images=True)
    if isinstance(part, T5Embedding):
        return part.replace(around_images=True, owner=_nested(part.owner))
    if isinstance(part, (CausalLmHead, T5Head)):
        part = part.replace(tied_to=_nested(part.tied_to) if part.tied_to else "")
    return part.replace(sliced=True) if isinstance(part, CausalLmHead) else part


def _tower(c: Config) -> list[Stage]:
    v = c.nested("vision_config")
    width, heads = v.size("hidden_size", 1408), v.size("num_attention_heads", 16)
    v.divides("hidden_size", "num_attention_heads", width, heads)
    (side, _), (patch, _) = pair(v, "image_size", 224), pair(v, "patch_size", 14)
    pictures = Square(side=side, patch=patch, tokens=c.size("num_query_tokens", 32))
    attention = BlipAttention(
        heads=heads,
        size=width // heads,
        bias=v.flag("qkv_bias", True),
        dropout=v.probability("attention_dropout"),
    )
    layer = TowerLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 6144),
        activation=v.activation("hidden_act", "gelu"),
        output="projection",
    )
    return [
        Stage(part=BlipPatches(pictures=pictures, width=width, patch=(patch, patch)), path=TOWER),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 39),
            path=f"{TOWER}.encoder.layers",
            checkpointed=True,
        ),
        Stage(part=TowerNorm(norm=LAYER, name="post_layernorm"), path=TOWER, publishes=STATES),
    ]


def _qformer(c: Config) -> list[Stage]:
    q = c.nested("qformer_config")
    width, heads = q.size("hidden_size", 768), q.size("num_attention_heads", 12)
    q.divides("hidden_size", "num_attention_heads", width, heads)
    if q.flag("use_qformer_text_input"):
        raise InputError(
            "config field use_qformer_text_input=true of qformer_config has no rules in a blip-2;"
            " use `estimate trace`"
        )
    dropout = q.probability("hidden_dropout_prob", 0.1)
    every = q.size("cross_attention_frequency", 2)
    plain = QFormerLayer(
        width=width,
        inner=q.size("intermediate_size", 3072),
        heads=heads,
        activation=q.activation("hidden_act", "gelu"),
        dropout=dropout,
        attention_dropout=q.probability("attention_probs_dropout_prob", 0.1),
    )
    layers = [
        Stage(
            part=plain.replace(across=index % every == 0),
            path=f"{QFORMER}.encoder.layer",
            checkpointed=True,
        )
        for index in range(q.size("num_hidden_layers", 12))
    ]
    first = Queries(count=c.size("num_query_tokens", 32), width=width, dropout=dropout)
    return [Stage(part=first), *runs(layers)]
