"""ModernBERT."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b
from napkinmath.lowering.linears import TASK_HEAD
from napkinmath.models.families.bert import SEQUENCE_CLASSIFICATION, encoder_symbols, head_class
from napkinmath.models.families.config import Config, runs
from napkinmath.models.layers.modernbert import ModernBertEmbedding, ModernBertEnd, ModernBertLayer
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.task_heads import ClassificationHead, MaskedLmHead, MeanOutput


def _classifier(c: Config) -> ClassificationHead:
    """ModernBertForSequenceClassification's head: the first token through the masked model's dense
    layer and norm."""
    if c.text("classifier_pooling", "cls") != "cls":
        raise InputError(
            f"config field classifier_pooling={shown(c.values['classifier_pooling'])} is not"
            ' priced; use "cls", or run `estimate trace`'
        )
    return ClassificationHead(
        labels=c.num_labels(),
        pooler="head.dense",
        pooler_bias=c.flag("classifier_bias"),
        activation=c.activation("classifier_activation", "gelu"),
        pooled_norm="head.norm",
        dropout=c.probability("classifier_dropout"),
        kind=TASK_HEAD,
    )


def modernbert(c: Config) -> ModelSpec:
    """ModernBertForMaskedLM, its sequence classifier and ModernBertModel (transformers
    models/modernbert)."""
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
    ending = head_class(c, "ForMaskedLM")
    if ending == "Model":
        head = MeanOutput()
    elif ending == SEQUENCE_CLASSIFICATION:
        entrance, head = entrance.replace(labels=(b,)), _classifier(c)
    stages = (
        Stage(part=entrance, path="model"),
        *runs([Stage(part=part, path="model.layers", checkpointed=True) for part in body]),
        Stage(part=ModernBertEnd(norm=norm), path="model"),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="modernbert")
