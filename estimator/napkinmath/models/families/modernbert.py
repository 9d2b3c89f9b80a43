"""ModernBERT."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.bert import encoder_symbols, head_class
from napkinmath.models.families.config import Config, runs
from napkinmath.models.layers.modernbert import ModernBertEmbedding, ModernBertEnd, ModernBertLayer
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.task_heads import MaskedLmHead, MeanOutput


def modernbert(c: Config) -> ModelSpec:
    """ModernBertForMaskedLM and ModernBertModel (transformers models/modernbert)."""
    symbols = encoder_symbols(c)
    layers, every, half = (
        symbols["L"],
        c.size("global_attn_every_n_layers", 3),
        c.size("local_attention", 128) // 2,
    )
    slides = c.sliding_layers(layers, [index % every > 0 for index in range(layers)])
    norm = Norm(kind=NormKind.LAYER if c.flag("norm_bias") else NormKind.LAYER_NO_BIAS)
    tables = tuple(
        name for name, used in ((" full", not all(slides)), (" sliding", any(slides))) if used
    )
    entrance = ModernBertEmbedding(
        norm=norm,
        window=half if any(slides) else 0,
        tables=tables,
        dropout=c.probability("embedding_dropout"),
    )
    layer = ModernBertLayer(
        norm=norm,
        activation=c.activation("hidden_activation", "gelu"),
        attention_bias=c.flag("attention_bias"),
        mlp_bias=c.flag("mlp_bias"),
        attention_dropout=c.probability("attention_dropout"),
        mlp_dropout=c.probability("mlp_dropout"),
    )
    body = [
        layer.replace(
            first=index == 0, window=half if slide else 0, tables=" sliding" if slide else " full"
        )
        for index, slide in enumerate(slides)
    ]
    head: Part = MaskedLmHead(
        dense="head.dense",
        norm="head.norm",
        decoder="decoder",
        tied_to=(
            "model.embeddings.tok_embeddings.weight" if c.flag("tie_word_embeddings", True) else ""
        ),
        activation=c.activation("classifier_activation", "gelu"),
        dense_bias=c.flag("classifier_bias"),
        norm_bias=c.flag("norm_bias"),
        decoder_bias=c.flag("decoder_bias", True),
        upcast=True,
    )
    if head_class(c, "ForMaskedLM") == "Model":
        head = MeanOutput()
    stages = (
        Stage(part=entrance, path="model"),
        *runs([Stage(part=part, path="model.layers", checkpointed=True) for part in body]),
        Stage(part=ModernBertEnd(norm=norm), path="model"),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="modernbert")
