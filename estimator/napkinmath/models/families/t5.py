"""T5, mT5, UMT5, Flan-T5, T0: encoder-decoders."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b
from napkinmath.models.families.config import Config
from napkinmath.models.layers.t5 import T5Block, T5Embedding, T5Head, T5StackEnd
from napkinmath.models.layers.task_heads import EndOfTextHead
from napkinmath.models.tasks import SEQ2SEQ, SEQUENCE, named_task


def t5(c: Config) -> ModelSpec:
    """T5ForConditionalGeneration (transformers models/t5); the decoder's length is the symbol st.

    transformers 5 ties the head always; `tie_word_embeddings: false` (T5 1.1, Flan-T5) only leaves
    out the scaling before it.
    """
    return _t5(c, "relu", scaled=c.flag("tie_word_embeddings", True))


def mt5(c: Config) -> ModelSpec:
    """MT5ForConditionalGeneration (transformers models/mt5): gated."""
    return _t5(c, "gated-gelu", scaled=False)


def umt5(c: Config) -> ModelSpec:
    """UMT5ForConditionalGeneration (transformers models/umt5): every block has its own table of
    relative positions."""
    return _t5(c, "gated-gelu", scaled=c.flag("tie_word_embeddings", True), own=True)


def _t5(c: Config, default: str, *, scaled: bool, own: bool = False) -> ModelSpec:
    kind, probability = c.text("feed_forward_proj", default), c.number("dropout_rate", 0.1)
    layers, heads = c.size("num_layers"), c.size("num_heads")
    decoders = c.size("num_decoder_layers", layers)
    symbols = {
        "h": c.size("d_model"),
        "a": heads,
        "k": heads,
        "dh": c.size("d_kv", 64),
        "f": c.size("d_ff"),
        "v": c.size("vocab_size"),
        "L": layers + decoders,
    }
    named = "gelu_new" if kind == "gated-gelu" else kind.rpartition("-")[2]
    activation = c.known_activation("feed_forward_proj", named)
    block = T5Block(
        gated=kind.startswith("gated-"), activation=activation, dropout=probability, own=own
    )
    buckets = c.size("relative_attention_num_buckets", 32)
    entrance = T5Embedding(dropout=probability)
    head: Part = T5Head(tied_to="shared.weight", scaled=scaled)
    decoder = entrance.replace(decoder=True)
    if named_task(next(iter(c.names("architectures")), ""), SEQ2SEQ) == SEQUENCE:
        head = EndOfTextHead(labels=c.num_labels(), dropout=c.probability("classifier_dropout"))
        decoder = decoder.replace(labels=(b,))
    stages = (
        Stage(part=entrance),
        *_blocks(block, "encoder.block", layers, buckets),
        Stage(
            part=T5StackEnd(dropout=probability),
            path="encoder",
            publishes="encoder states",
            closes=("encoder bias", "encoder embeddings"),
        ),
        Stage(part=decoder),
        *_blocks(block.replace(decoder=True), "decoder.block", decoders, buckets),
        Stage(part=T5StackEnd(dropout=probability), path="decoder"),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="t5")


def _blocks(block: T5Block, path: str, count: int, buckets: int) -> tuple[Stage, ...]:
    """A stack's blocks: the first makes the position bias and hands it to the others."""
    if block.own:
        every = block.replace(buckets=buckets)
        return (Stage(part=every, count=count, path=path, checkpointed=True),)
    first = Stage(part=block.replace(buckets=buckets), path=path, checkpointed=True)
    return (
        (first, Stage(part=block, count=count - 1, path=path, checkpointed=True))
        if count > 1
        else (first,)
    )
