"""BERT and its kin: bidirectional encoders with learned positions and post-norm layers."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b, s
from napkinmath.lowering.linears import TASK_HEAD
from napkinmath.models.families.config import Config, pads
from napkinmath.models.layers.encoder import (
    BertLayer,
    BidirectionalAttention,
    DistilBertLayer,
    EncoderEmbedding,
)
from napkinmath.models.layers.task_heads import ClassificationHead, MaskedLmHead, MeanOutput

SEQUENCE_CLASSIFICATION = "ForSequenceClassification"


CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")


def head_class(c: Config, default: str) -> str:
    """What follows the model's name in `architectures`: ForMaskedLM, ForSequenceClassification,
    Model."""
    name = (c.names("architectures") or (default,))[0]
    if name.endswith(CAUSAL_CLASSES[1]):
        return CAUSAL_CLASSES[1]
    return name[name.index("For") :] if "For" in name else "Model"


def encoder_symbols(
    c: Config,
    *,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    width: str = "intermediate_size",
    layers: str = "num_hidden_layers",
) -> dict[str, int]:
    """h, a, k, dh, f, v, L of an encoder."""
    size, count = c.size(hidden), c.size(heads)
    c.divides(hidden, heads, size, count)
    return {
        "h": size,
        "a": count,
        "k": count,
        "dh": size // count,
        "f": c.size(width),
        "v": c.size("vocab_size", 1),
        "L": c.size(layers),
    }


def _tied(c: Config, name: str) -> str:
    """Path of the embedding that the decoder of masked tokens shares, or nothing."""
    shared = c.flag("tie_word_embeddings", True)
    return f"{name}.embeddings.word_embeddings.weight" if shared else ""


def bert(c: Config) -> ModelSpec:
    """BertForMaskedLM, BertForSequenceClassification and BertModel (transformers models/bert)."""
    mlm = MaskedLmHead(
        tied_to=_tied(c, "bert"),
        activation=c.activation("hidden_act", "gelu"),
    )
    return _bert(
        c,
        "bert",
        mlm,
        pooler="bert.pooler.dense",
        segments=c.size("type_vocab_size", 2),
        from_ids=False,
    )


def roberta(c: Config) -> ModelSpec:
    """RobertaForMaskedLM, XLMRobertaForMaskedLM and their sequence classifiers (transformers
    models/roberta)."""
    mlm = MaskedLmHead(
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        decoder="lm_head.decoder",
        tied_to=_tied(c, "roberta"),
    )
    return _bert(
        c,
        "roberta",
        mlm,
        pooler="classifier.dense",
        segments=c.size("type_vocab_size", 1),
        from_ids=True,
    )


def _bert(
    c: Config, name: str, mlm: MaskedLmHead, *, pooler: str, segments: int, from_ids: bool
) -> ModelSpec:
    symbols, kind = encoder_symbols(c), head_class(c, "ForMaskedLM")
    hidden_dropout = c.number("hidden_dropout_prob", 0.1)
    classified, decoder = kind == SEQUENCE_CLASSIFICATION, c.flag("is_decoder", False)
    embedding = EncoderEmbedding(
        positions=c.size("max_position_embeddings", 512),
        segments=segments,
        dropout=hidden_dropout,
        padded=pads(c, True),
        position_of_each_token=from_ids,
        causal=decoder,
        labels=(b,) if classified else (b, s),
    )
    layer = BertLayer(
        attention=BidirectionalAttention(
            dropout=c.number("attention_probs_dropout_prob", 0.1), causal=decoder
        ),
        activation=c.activation("hidden_act", "gelu"),
        dropout=hidden_dropout,
    )
    head: Part = MeanOutput(pooler=f"{name}.pooler.dense") if kind == "Model" else mlm
    if kind in CAUSAL_CLASSES:
        head = mlm.replace(shifts=True, upcast=True)
    if classified:
        last = "classifier.out_proj" if from_ids else "classifier"
        head = ClassificationHead(
            labels=c.num_labels(),
            pooler=pooler,
            pooler_kind=TASK_HEAD if from_ids else "linear",
            dropout=c.number("classifier_dropout", hidden_dropout),
            name=last,
            kind=TASK_HEAD,
        )
    return encoder(c, symbols, name, embedding, layer, head)


def distilbert(c: Config) -> ModelSpec:
    """DistilBertForMaskedLM and its sequence classifier (transformers models/distilbert)."""
    symbols = encoder_symbols(
        c, hidden="dim", heads="n_heads", width="hidden_dim", layers="n_layers"
    )
    kind, probability, activation = (
        head_class(c, "ForMaskedLM"),
        c.number("dropout", 0.1),
        c.activation("activation", "gelu"),
    )
    classified = kind == SEQUENCE_CLASSIFICATION
    embedding = EncoderEmbedding(
        positions=c.size("max_position_embeddings", 512),
        dropout=probability,
        padded=pads(c, True),
        labels=(b,) if classified else (b, s),
    )
    attention = BidirectionalAttention(
        names=("q_lin", "k_lin", "v_lin"), dropout=c.number("attention_dropout", 0.1)
    )
    head: Part = MaskedLmHead(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        tied_to=_tied(c, "distilbert"),
        activation=activation,
    )
    if classified:
        head = ClassificationHead(
            labels=c.num_labels(),
            kind=TASK_HEAD,
            pooler="pre_classifier",
            pooler_kind=TASK_HEAD,
            activation="relu",
            dropout=c.number("seq_classif_dropout", 0.2),
        )
    layer = DistilBertLayer(attention=attention, activation=activation, dropout=probability)
    return encoder(c, symbols, "distilbert", embedding, layer, head, path="transformer.layer")


def encoder(
    c: Config,
    symbols: dict[str, int],
    name: str,
    embedding: Part,
    layer: Part,
    head: Part,
    *,
    path: str = "encoder.layer",
) -> ModelSpec:
    """Embeddings, equal layers and a head under the model's name."""
    return c.spec(
        (
            Stage(part=embedding, path=f"{name}.embeddings"),
            Stage(part=layer, count=symbols["L"], path=f"{name}.{path}", checkpointed=True),
            Stage(part=head),
        ),
        symbols,
        family=name,
    )
