"""ALBERT: an encoder whose layers share their weights."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b, s
from napkinmath.lowering.linears import TASK_HEAD
from napkinmath.models.families.bert import (
    SEQUENCE_CLASSIFICATION,
    encoder_symbols,
    head_class,
)
from napkinmath.models.families.config import Config, pads
from napkinmath.models.layers.albert import AlbertEmbedding, AlbertLayer
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.task_heads import ClassificationHead, MaskedLmHead, MeanOutput


def albert(c: Config) -> ModelSpec:
    """AlbertModel, AlbertForMaskedLM and AlbertForSequenceClassification (transformers
    models/albert)."""
    symbols, kind = encoder_symbols(c), head_class(c, "ForMaskedLM")
    classified = kind == SEQUENCE_CLASSIFICATION
    narrow, activation = c.size("embedding_size", 128), c.activation("hidden_act", "gelu_new")
    probability = c.probability("hidden_dropout_prob")
    entrance = AlbertEmbedding(
        positions=c.size("max_position_embeddings", 512),
        segments=c.size("type_vocab_size", 2),
        dropout=probability,
        padded=pads(c, True),
        width=narrow,
        labels=(b,) if classified else (b, s),
    )
    layer = AlbertLayer(
        attention=BidirectionalAttention(dropout=c.probability("attention_probs_dropout_prob")),
        activation=activation,
        dropout=probability,
    )
    head: Part = MaskedLmHead(
        dense="predictions.dense",
        norm="predictions.LayerNorm",
        decoder="predictions.decoder",
        tied_to=(
            "albert.embeddings.word_embeddings.weight"
            if c.flag("tie_word_embeddings", True)
            else ""
        ),
        activation=activation,
        width=narrow,
    )
    if kind == "Model":
        head = MeanOutput(pooler="albert.pooler")
    if classified:
        head = ClassificationHead(
            labels=c.num_labels(),
            pooler="albert.pooler",
            dropout=c.probability("classifier_dropout_prob", 0.1),
            kind=TASK_HEAD,
        )
    stages = (
        Stage(part=entrance, path="albert"),
        *_layers(c, layer, symbols["L"]),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="albert")


def _layers(c: Config, layer: AlbertLayer, count: int) -> list[Stage]:
    """Every run of a layer's weights."""
    groups, inner = c.size("num_hidden_groups", 1), c.size("inner_group_num", 1)
    used: dict[str, int] = {}
    stages: list[Stage] = []
    for index in range(count):
        group = int(index / (count / groups))
        for place in range(inner):
            path = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{place}"
            stages.append(Stage(part=layer.replace(use=used.get(path, 0)), path=path))
            used[path] = used.get(path, 0) + 1
    return stages
