"""Whisper."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config, pads
from napkinmath.models.layers.vision_towers import TowerNorm
from napkinmath.models.layers.whisper import (
    ENCODED,
    NORM,
    WhisperEntrance,
    WhisperHead,
    WhisperLayer,
    WhisperWords,
)


def whisper(c: Config) -> ModelSpec:
    """WhisperForConditionalGeneration (transformers models/whisper): a sequence is what the decoder
    reads, beside 30 seconds of sound."""
    width, heads = c.size("d_model"), c.size("encoder_attention_heads")
    if c.size("decoder_attention_heads", heads) != heads:
        raise InputError(
            "encoder_attention_heads and decoder_attention_heads differ; this family needs them"
            " equal"
        )
    c.divides("d_model", "encoder_attention_heads", width, heads)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if c.number(name, 0.0):
            raise InputError(
                f"config field {name}={shown(c.values[name])} has no rules: layers that are left"
                " out at random; use 0"
            )
    encoders, decoders = c.size("encoder_layers"), c.size("decoder_layers")
    positions, probability = c.size("max_source_positions", 1500), c.probability("dropout")
    symbols = {
        "h": width,
        "a": heads,
        "k": heads,
        "dh": width // heads,
        "v": c.size("vocab_size", 51865),
        "L": encoders + decoders,
    }
    layer = WhisperLayer(
        positions=positions,
        width=c.size("encoder_ffn_dim"),
        activation=c.activation("activation_function", "gelu"),
        dropout=probability,
        attention_dropout=c.probability("attention_dropout"),
        activation_dropout=c.probability("activation_dropout"),
    )
    entrance = WhisperEntrance(
        bins=c.size("num_mel_bins", 80), positions=positions, dropout=probability
    )
    words = WhisperWords(
        positions=c.size("max_target_positions", 448), dropout=probability, padded=pads(c, True)
    )
    last = layer.replace(decoder=True, width=c.size("decoder_ffn_dim"))
    table = "model.decoder.embed_tokens.weight"
    tied = c.flag("tie_word_embeddings", True)
    stages = (
        Stage(part=entrance, path="model.encoder"),
        Stage(part=layer, count=encoders, path="model.encoder.layers", checkpointed=True),
        Stage(
            part=TowerNorm(norm=NORM, name="layer_norm"), path="model.encoder", publishes=ENCODED
        ),
        Stage(part=words, path="model.decoder"),
        Stage(part=last, count=decoders, path="model.decoder.layers", checkpointed=True),
        Stage(part=WhisperHead(tied_to=table if tied else "")),
    )
    return c.spec(stages, symbols, family="whisper")
