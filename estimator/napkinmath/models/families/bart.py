"""BART and its kin: mBART, Pegasus, M2M-100 and NLLB, Marian, Blenderbot, PLBART."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b
from napkinmath.models.families.config import Config
from napkinmath.models.layers.bart import (
    BartEmbedding,
    BartHead,
    BartLayer,
    BartNorm,
    Places,
    held_places,
)
from napkinmath.models.layers.idle import IdleLinear, IdleModule, idle_layer_norm
from napkinmath.models.layers.task_heads import EndOfTextHead
from napkinmath.models.tasks import CAUSAL, SEQ2SEQ, SEQUENCE, named_task

ENCODED, DECODER = "encoder states", "model.decoder.layers"
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
    task = named_task(next(iter(c.names("architectures")), ""), SEQ2SEQ)
    if task == CAUSAL:
        symbols["L"] = decoders
        return c.spec(_alone(entrance, _last_of(layer, c), decoders, c), symbols, family=family)
    ends = norm_first  # with a norm behind the layers
    body = Stage(part=layer, path="model.encoder.layers", checkpointed=True)
    last = _last_of(layer, c)
    head: Part = BartHead(tied_to="model.encoder.embed_tokens.weight", biased=biased)
    if task == SEQUENCE:
        head = EndOfTextHead(labels=c.num_labels(), dropout=c.probability("classifier_dropout"))
    decoder = entrance.replace(decoder=True, **({"labels": (b,)} if task == SEQUENCE else {}))
    stages = (
        Stage(part=entrance, path="model.encoder"),
        *((body.replace(count=encoders - 1),) if encoders > 1 else ()),
        body.replace(closes=(held_places(decoder=False),), publishes="" if ends else ENCODED),
        *((Stage(part=BartNorm(), path="model.encoder", publishes=ENCODED),) * ends),
        Stage(part=decoder, path="model.decoder"),
        _decoding(last, decoders),
        *((Stage(part=BartNorm(), path="model.decoder"),) * ends),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family=family)


def _decoding(layer: BartLayer, count: int) -> Stage:
    closes = (held_places(decoder=True),)
    return Stage(part=layer, count=count, path=DECODER, checkpointed=True, closes=closes)


def _last_of(layer: BartLayer, c: Config) -> BartLayer:
    """The decoder's layer beside the encoder's."""
    return layer.replace(decoder=True, width=c.size("decoder_ffn_dim"))


def _alone(entrance: BartEmbedding, layer: BartLayer, count: int, c: Config) -> tuple[Stage, ...]:
    """BartForCausalLM: the decoder alone. Its layers have weights to attend to an encoder that no
    batch runs."""
    tied = c.flag("tie_word_embeddings", True)
    head = BartHead(
        alone=True, biased=False, tied_to="model.decoder.embed_tokens.weight" if tied else ""
    )
    unread = _cross_attention(c.size("d_model"))
    return (
        Stage(part=entrance.replace(decoder=True, alone=True), path="model.decoder"),
        _decoding(layer.replace(alone=True), count),
        Stage(part=unread, count=count, path=DECODER, modality="idle"),
        *((Stage(part=BartNorm(), path="model.decoder"),) * layer.norm_first),
        Stage(part=head),
    )


def _cross_attention(width: int) -> IdleModule:
    """The projections and the norm of an attention that does not run."""
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    linears = [
        IdleLinear(name=f"encoder_attn.{name}", inputs=width, outputs=width, bias=True)
        for name in names
    ]
    norm = idle_layer_norm("encoder_attn_layer_norm", width)
    return IdleModule(linears=tuple(linears), weights=norm)
