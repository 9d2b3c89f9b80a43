"""BART: encoder and decoder layers with a norm after each residual, learned positions, biases
everywhere.

Source: transformers 5.23 models/bart/modeling_bart.py. With labels given, the decoder builds no
cache.
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached, decoded
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, dh, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.encoder import add_broadcast
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.t5 import st
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, dropout, scale
from napkinmath.ops.index import constant, embedding, input_leaf, model_input
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.whole_scores import eager_attention


class BartEmbedding(Part):
    """The entrance of a stack: shared embeddings times a number, learned positions, LayerNorm,
    dropout."""

    decoder: bool = False
    positions: int
    dropout: float = 0.1

    @property
    def longest_sequence(self) -> int:
        return self.positions

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        length: Size = st if self.decoder else s
        if self.decoder:
            shared["labels"] = model_input(t, "labels", (b, st), INT64)
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
                shared["decoder mask"] = constant(t, "causal mask", (b, 1, st, st), words.dtype)
            rows: Size = 1 if self.decoder else b
            places = embedding(
                t,
                constant(t, "position ids", (rows, length), INT64),
                "embed_positions",
                self.positions + 2,
                h,
            )
            frame.local(places)
            total = add_broadcast(t, words, places) if self.decoder else add(t, words, places)
            return dropout(t, layer_norm(t, total, name="layernorm_embedding"), self.dropout)


class BartLayer(Part):
    """Self-attention, cross-attention in the decoder, feed-forward; dropout, residual and norm
    after each."""

    decoder: bool = False
    width: int
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of the decoder's own tokens and of the encoder's."""
        return decoded(a) if self.decoder else ()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        for scope in ("self_attn", "encoder_attn") if self.decoder else ("self_attn",):
            with t.scope() as frame:
                frame.local(x)
                attended = self._attention(t, x, scope, shared)
                x = layer_norm(
                    t, add(t, x, dropout(t, attended, self.dropout)), name=f"{scope}_layer_norm"
                )
        with t.scope() as frame:
            frame.local(x)
            wide = activate(t, linear(t, x, "fc1", self.width, bias=True), self.activation)
            out = linear(t, dropout(t, wide, self.activation_dropout), "fc2", h, bias=True)
            return layer_norm(t, add(t, x, dropout(t, out, self.dropout)), name="final_layer_norm")

    def _attention(self, t: Tape, x: Value, scope: str, shared: dict[str, Value]) -> Value:
        cross = scope == "encoder_attn"
        source = shared["encoder states"] if cross else x
        keys: Size = st if self.decoder and not cross else s
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

    @property
    def task(self) -> str:
        return "seq2seq-lm"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            bias = t.weight("final_logits_bias", (1, v), kind="norm", buffer=True).value
            with t.scope("lm_head"):
                weight = t.weight("weight", (v, h), kind="head", tied_to=self.tied_to)
            logits = add(
                t, linear(t, x, "lm_head", v, kind="head", role=Role.LOGITS, weight=weight), bias
            )
            frame.local(logits)
            return cross_entropy(t, logits, upcast=False)
