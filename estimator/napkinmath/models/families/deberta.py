"""DeBERTa V2 and V3."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b
from napkinmath.lowering.linears import TASK_HEAD
from napkinmath.models.families.bert import (
    SEQUENCE_CLASSIFICATION,
    encoder_symbols,
    head_class,
)
from napkinmath.models.families.config import Config
from napkinmath.models.layers.deberta import DebertaEmbedding, DisentangledAttention
from napkinmath.models.layers.encoder import BertLayer
from napkinmath.models.layers.task_heads import ClassificationHead, MaskedLmHead, MeanOutput


def deberta_v2(c: Config) -> ModelSpec:
    """DebertaV2Model, DebertaV2ForMaskedLM and DebertaV2ForSequenceClassification (transformers
    models/deberta_v2)."""
    symbols, kind = encoder_symbols(c), head_class(c, "ForMaskedLM")
    if not c.flag("relative_attention") or c.size("conv_kernel_size", 0, low=0):
        raise InputError(
            "this family reads DeBERTa with relative_attention and without a convolution"
            " (conv_kernel_size); use such a config"
        )
    if c.size("embedding_size", symbols["h"]) != symbols["h"]:
        raise InputError(
            "config field embedding_size differs from hidden_size; this family needs them equal"
        )
    probability = c.probability("hidden_dropout_prob", 0.1)
    reach, buckets = c.whole("max_relative_positions", -1), c.whole("position_buckets", -1)
    distances = 2 * (
        buckets if buckets > 0 else reach if reach > 0 else c.size("max_position_embeddings", 512)
    )
    entrance = DebertaEmbedding(
        reach=c.size("max_position_embeddings", 512),
        positions=(
            c.size("max_position_embeddings", 512) if c.flag("position_biased_input", True) else 0
        ),
        segments=c.size("type_vocab_size", 0, low=0),
        distances=distances,
        normed="layer_norm" in c.text("norm_rel_ebd", "none"),
        dropout=probability,
        **({"labels": (b,)} if kind == SEQUENCE_CLASSIFICATION else {}),
    )
    attention = DisentangledAttention(
        shared_keys=c.flag("share_att_key"),
        types=_types(c),
        distances=distances,
        dropout=c.probability("attention_probs_dropout_prob", 0.1),
        table_dropout=probability,
    )
    activation = c.activation("hidden_act", "gelu")
    head: Part = MeanOutput()
    if kind != "Model":
        head = MaskedLmHead(
            tied_to="deberta.embeddings.word_embeddings.weight", activation=activation
        )
    if kind == SEQUENCE_CLASSIFICATION:
        head = ClassificationHead(
            labels=c.num_labels(),
            kind=TASK_HEAD,
            pooler="pooler.dense",
            activation=c.activation("pooler_hidden_act", "gelu"),
            dropout=probability,
        )
    stages = (
        Stage(part=entrance, path="deberta"),
        Stage(
            part=BertLayer(attention=attention, activation=activation, dropout=probability),
            count=symbols["L"],
            path="deberta.encoder.layer",
            checkpointed=True,
        ),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="deberta")


def _types(c: Config) -> tuple[str, ...]:
    """pos_att_type, a list or names joined by |; InputError where it has neither of the two."""
    value = c.values.get("pos_att_type")
    found = (
        tuple(part.strip() for part in value.split("|"))
        if isinstance(value, str)
        else c.names("pos_att_type")
    )
    if not {"c2p", "p2c"}.intersection(found):
        raise InputError(
            f"config field pos_att_type={shown(value)} has neither c2p nor p2c, without which"
            " relative_attention adds nothing; give one or both"
        )
    return found
