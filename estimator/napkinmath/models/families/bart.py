"""BART."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.bart import BartEmbedding, BartHead, BartLayer


def bart(c: Config) -> ModelSpec:
    """BartForConditionalGeneration (transformers models/bart); the decoder's length is the symbol
    st."""
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
    entrance = BartEmbedding(positions=c.size("max_position_embeddings", 1024), dropout=probability)
    layer = BartLayer(
        width=c.size("encoder_ffn_dim"),
        activation=c.activation("activation_function", "gelu"),
        dropout=probability,
        attention_dropout=c.probability("attention_dropout"),
        activation_dropout=c.probability("activation_dropout"),
    )
    body = Stage(part=layer, path="model.encoder.layers", checkpointed=True)
    last = layer.replace(decoder=True, width=c.size("decoder_ffn_dim"))
    stages = (
        Stage(part=entrance, path="model.encoder"),
        *((body.replace(count=encoders - 1),) if encoders > 1 else ()),
        body.replace(publishes="encoder states"),
        Stage(part=entrance.replace(decoder=True), path="model.decoder"),
        Stage(part=last, count=decoders, path="model.decoder.layers", checkpointed=True),
        Stage(part=BartHead(tied_to="model.encoder.embed_tokens.weight")),
    )
    return c.spec(stages, symbols, family="bart")
