"""BART and its kin: mBART, Pegasus, M2M-100 and NLLB, Marian, Blenderbot, PLBART."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.bart import BartEmbedding, BartHead, BartLayer, BartNorm, Places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def bart(c: Config) -> ModelSpec:
    """BartForConditionalGeneration (transformers models/bart); the decoder's length is the symbol
    st. Layers that a config leaves out at random (`encoder_layerdrop`) are priced as run."""
    return _bart(c, "bart")


def mbart(c: Config) -> ModelSpec:
    """MBartForConditionalGeneration: norms before each sublayer (transformers models/mbart)."""
    return _bart(c, "mbart", norm_first=True)


def plbart(c: Config) -> ModelSpec:
    """PLBartForConditionalGeneration (transformers models/plbart)."""
    return _bart(c, "plbart", attention_dropout=0.1)


def pegasus(c: Config) -> ModelSpec:
    """PegasusForConditionalGeneration: sines for positions (transformers models/pegasus)."""
    sines: dict[str, Any] = {"places": Places.FROZEN, "offset": 0, "normed": False}
    return _bart(c, "pegasus", norm_first=True, **sines)


def m2m_100(c: Config) -> ModelSpec:
    """M2M100ForConditionalGeneration, NLLB 200: sines in a buffer, no bias behind the head
    (transformers models/m2m_100)."""
    how: dict[str, Any] = {"places": Places.TABLE, "normed": False}
    how |= {"activation": "relu", "attention_dropout": 0.1}
    return _bart(c, "m2m_100", norm_first=True, biased=False, **how)


def marian(c: Config) -> ModelSpec:
    """MarianMTModel of one vocabulary: norms after each residual, sines (transformers
    models/marian)."""
    if not c.flag("share_encoder_decoder_embeddings", True):
        raise InputError(
            "config field share_encoder_decoder_embeddings=false has no rules; run `estimate trace`"
        )
    return _bart(c, "marian", places=Places.FROZEN, offset=0, normed=False)


def blenderbot(c: Config) -> ModelSpec:
    """BlenderbotForConditionalGeneration (transformers models/blenderbot)."""
    return _bart(c, "blenderbot", norm_first=True, normed=False, offset=0, once=True)


def blenderbot_small(c: Config) -> ModelSpec:
    """BlenderbotSmallForConditionalGeneration (transformers models/blenderbot_small)."""
    return _bart(c, "blenderbot-small", offset=0, once=True, norms_words=True)


def _bart(
    c: Config,
    family: str,
    *,
    norm_first: bool = False,
    biased: bool = True,
    activation: str = "gelu",
    attention_dropout: float = 0.0,
    **places: Any,
) -> ModelSpec:
    width, heads, probability = (
        c.size("d_model"),
        c.size("encoder_attention_heads"),
        c.probability("dropout", 0.1),
    )
    if c.size("decoder_attention_heads", heads) != heads:
        raise InputError(
            "encoder_attention_heads and decoder_attention_heads differ; this family needs them"
            " equal"
        )
    c.divides("d_model", "encoder_attention_heads", width, heads)
    encoders, decoders = c.size("encoder_layers"), c.size("decoder_layers")
    symbols = {
        "h": width,
        "a": heads,
        "k": heads,
        "dh": width // heads,
        "v": c.size("vocab_size"),
        "L": encoders + decoders,
    }
    rows = c.size("max_position_embeddings", 1024)
    entrance = BartEmbedding(positions=rows, dropout=probability, **places)
    layer = BartLayer(
        width=c.size("encoder_ffn_dim"),
        activation=c.activation("activation_function", activation),
        dropout=probability,
        attention_dropout=c.probability("attention_dropout", attention_dropout),
        activation_dropout=c.probability("activation_dropout"),
        norm_first=norm_first,
    )
    ends = norm_first  # with a norm behind the layers
    body = Stage(part=layer, path="model.encoder.layers", checkpointed=True)
    last = layer.replace(decoder=True, width=c.size("decoder_ffn_dim"))
    stages = (
        Stage(part=entrance, path="model.encoder"),
        *((body.replace(count=encoders - 1),) if encoders > 1 else ()),
        body if ends else body.replace(publishes="encoder states"),
        *((Stage(part=BartNorm(), path="model.encoder", publishes="encoder states"),) * ends),
        Stage(part=entrance.replace(decoder=True), path="model.decoder"),
        Stage(part=last, count=decoders, path="model.decoder.layers", checkpointed=True),
        *((Stage(part=BartNorm(), path="model.decoder"),) * ends),
        Stage(part=BartHead(tied_to="model.encoder.embed_tokens.weight", biased=biased)),
    )
    return c.spec(stages, symbols, family=family)
