"""BART and its kin: encoder and decoder layers with a norm after each residual, or before each
sublayer, positions that are learned or not, biases everywhere.

Source: transformers 5.23 models/bart, mbart, pegasus, m2m_100, marian, blenderbot. With labels
given, the decoder builds no cache.
"""

from __future__ import annotations

from enum import Enum

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached, decoded
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, dh, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.t5 import st
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, add_broadcast, dropout, scale
from napkinmath.ops.index import constant, embedding, input_leaf, model_input
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.whole_scores import eager_attention


class Places(str, Enum):
    """What a stack's positions are."""

    LEARNED = "learned"
    FROZEN = "frozen"
    """A parameter that is never trained, read without a graph (Pegasus, Marian)."""
    TABLE = "table"
    """A buffer, whose rows are taken for every sequence (M2M-100)."""


def held_places(*, decoder: bool) -> str:
    """Key of a stack's positions, a local of its forward."""
    return f"{'decoder' if decoder else 'encoder'} places"


class BartEmbedding(Part):
    """The entrance of a stack: shared embeddings times a number, positions, LayerNorm, dropout."""

    decoder: bool = False
    positions: int
    dropout: float = 0.1
    places: Places = Places.LEARNED
    offset: int = 2
    """Rows of the table before those of the positions."""
    normed: bool = True
    once: bool = False
    """Positions are read once, not for each sequence of the encoder."""
    norms_words: bool = False
    """The decoder norms its words, and adds the positions then (Blenderbot small)."""
    alone: bool = False
    """A decoder without an encoder: it reads the batch's tokens."""
    labels: tuple[Size, ...] = (b, st)
    """Those that the decoder reads shifted; of a classifier it reads the encoder's tokens."""

    @property
    def longest_sequence(self) -> int:
        return self.positions

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        length: Size = st if self.decoder and not self.alone else s
        if self.alone:
            shared["labels"] = model_input(t, "labels", (b, s), INT64)
        if self.decoder and not self.alone:
            shared["labels"] = model_input(t, "labels", self.labels, INT64)
            ids = constant(t, "shifted labels", (b, st), INT64)
            with t.scope("embed_tokens"):
                table = t.weight(
                    "weight", (v, h), kind="embedding", tied_to="model.encoder.embed_tokens.weight"
                )
            words = embedding(t, ids, "embed_tokens", v, h, padded=True, weight=table)
        else:
            ids = shared["input_ids"] = model_input(t, "input ids", (b, s), INT64)
            words = embedding(t, ids, "embed_tokens", v, h, padded=True)
        with t.scope() as frame:
            words = input_leaf(t, scale(t, words))
            frame.local(words)
            if self.decoder and t.policy.config.attention is Attention.EAGER:
                shared["decoder mask"] = constant(
                    t, "causal mask", (b, 1, length, length), words.dtype
                )
            if self.norms_words and self.decoder:
                words = layer_norm(t, words, name="layernorm_embedding")
                frame.local(words)
            places = self._places(t, words, length)
            frame.local(places)
            shared[held_places(decoder=self.decoder)] = places
            total = (
                add(t, words, places) if places.axes[0] is b else add_broadcast(t, words, places)
            )
            if self.normed and not (self.norms_words and self.decoder):
                total = layer_norm(t, total, name="layernorm_embedding")
            return dropout(t, total, self.dropout)

    def _places(self, t: Tape, words: Value, length: Size) -> Value:
        rows: Size = 1 if self.decoder or self.once else b
        table = (self.positions + self.offset, h)
        if self.places is Places.LEARNED:
            ids = constant(t, "position ids", (rows, length), INT64)
            return embedding(t, ids, "embed_positions", *table)
        if self.places is Places.TABLE:
            with t.scope("embed_positions"):
                kept = t.weight("weights", table, kind="statistics", buffer=True).value
            return constant(t, "positions", (b, length, h), kept.dtype)
        with t.scope("embed_positions"):
            t.weight("weight", table, kind="statistics")
        return constant(t, "positions", (1, length, h), words.dtype)


class BartNorm(Part):
    """The norm behind the layers of a stack."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return layer_norm(t, x, name="layer_norm")


class BartLayer(Part):
    """Self-attention, cross-attention in the decoder, feed-forward; dropout, residual and norm
    after each."""

    decoder: bool = False
    width: int
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    norm_first: bool = False
    alone: bool = False
    """A decoder's layer that has no encoder to attend to (BartForCausalLM)."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of the decoder's own tokens and of the encoder's."""
        return decoded(a) if self.decoder else ()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        for scope in ("self_attn", "encoder_attn")[: 2 if self.decoder and not self.alone else 1]:
            with t.scope() as frame:
                frame.local(x)
                norm = f"{scope}_layer_norm"
                read = layer_norm(t, x, name=norm) if self.norm_first else x
                attended = self._attention(t, read, scope, shared)
                x = add(t, x, dropout(t, attended, self.dropout))
                x = x if self.norm_first else layer_norm(t, x, name=norm)
        with t.scope() as frame:
            frame.local(x)
            read = layer_norm(t, x, name="final_layer_norm") if self.norm_first else x
            wide = activate(t, linear(t, read, "fc1", self.width, bias=True), self.activation)
            out = linear(t, dropout(t, wide, self.activation_dropout), "fc2", h, bias=True)
            total = add(t, x, dropout(t, out, self.dropout))
            return total if self.norm_first else layer_norm(t, total, name="final_layer_norm")

    def _attention(self, t: Tape, x: Value, scope: str, shared: dict[str, Value]) -> Value:
        cross = scope == "encoder_attn"
        source = shared["encoder states"] if cross else x
        keys: Size = x.axes[1] if self.decoder and not cross else s
        causal = self.decoder and not cross
        with t.scope(scope) as frame:
            frame.local(x)
            q = self._heads(t, x, "q_proj", x.axes[1])
            key, value = (
                self._heads(t, source, "k_proj", keys),
                self._heads(t, source, "v_proj", keys),
            )
            frame.local(q, key, value)
            if t.policy.config.attention is Attention.EAGER:
                mask = shared["decoder mask"] if causal else None
                out = eager_attention(
                    t,
                    q,
                    key,
                    value,
                    groups=1,
                    mask=mask,
                    dropout_p=self.attention_dropout,
                    fp32_softmax=False,
                )
            else:
                out = sdpa(
                    t, q, key, value, groups=1, causal=causal, dropout_p=self.attention_dropout
                )
            frame.local(out)
            return linear(t, t.view(out, (b, x.axes[1], a * dh)), "out_proj", h, bias=True)

    def _heads(self, t: Tape, x: Value, name: str, length: Size) -> Value:
        return t.view(
            t.view(linear(t, x, name, a * dh, bias=True), (b, length, a, dh)), (b, a, length, dh)
        )


class BartHead(Part):
    """The head, a bias that is not trained, cross-entropy in the type of their sum."""

    tied_to: str = ""
    biased: bool = True
    alone: bool = False
    """It ends a decoder without an encoder; the labels are shifted already."""
    name: str = "lm_head"

    @property
    def task(self) -> str:
        return "causal-lm" if self.alone else "seq2seq-lm"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            with t.scope(self.name):
                weight = t.weight("weight", (v, h), kind="head", tied_to=self.tied_to)
            logits = linear(t, x, self.name, v, kind="head", role=Role.LOGITS, weight=weight)
            if self.biased:
                name = "final_logits_bias"
                logits = add(t, logits, t.weight(name, (1, v), kind="norm", buffer=True).value)
            frame.local(logits)
            return cross_entropy(t, logits, upcast=False)
