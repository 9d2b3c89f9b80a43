"""Whisper: an encoder over the mel features of 30 seconds of sound, a decoder that reads it.

Source: transformers 5.23 models/whisper/modeling_whisper.py. WhisperFeatureExtractor pads and cuts
every sample to 30 seconds, and the encoder refuses another length.
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached, decoded
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.sounds import Sound
from napkinmath.ir.symbols import a, b, dh, h, s, v
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, add_broadcast, copy, dropout, gelu, scale
from napkinmath.ops.index import constant, embedding, input_leaf, look_up, model_input
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.sounds import convolution
from napkinmath.ops.whole_scores import eager_attention

NORM = Norm(kind=NormKind.LAYER)
KERNEL = 3  # steps of both convolutions
FRAMES = 100  # of mel features a second: WhisperFeatureExtractor, 160 samples of 16 kHz apart
ENCODED = "encoder states"


class WhisperEntrance(Part):
    """Mel features through two convolutions, the second of stride 2, and a table of positions that
    is not trained."""

    bins: int
    """Mel bins of a step."""
    positions: int
    """Steps of the encoder, half of those of the features."""
    dropout: float = 0.0

    @property
    def hears(self) -> Sound:
        return Sound(seconds=2 * self.positions // FRAMES)

    @property
    def brings(self) -> str:
        return (
            f"every sample is {self.hears.seconds} s of sound, as the processor pads and cuts it:"
            f" {self.positions:,} steps of the encoder beside the tokens of the context"
        )

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        steps = 2 * self.positions
        with t.scope("conv1"):
            weight = t.weight("weight", (h, self.bins, KERNEL), kind="conv").value
        # neither the model nor a trainer casts them but under autocast
        given = model_input(t, "input features", (b, self.bins, steps), weight.dtype)
        shared["input features"] = given
        with t.scope() as frame:
            out = input_leaf(t, convolution(t, given, "conv1", h, KERNEL, steps))
            out = gelu(t, convolution(t, gelu(t, out), "conv2", h, KERNEL, self.positions))
            out = t.view(out, (b, self.positions, h))
            frame.local(out)
            with t.scope("embed_positions"):
                table = t.weight("weight", (self.positions, h), kind="embedding")
                table.trainable = table.value.requires_grad = False
            ids = constant(t, "all positions", (self.positions,), INT64)
            frame.local(ids)
            places = look_up(t, ids, table.value, h)
            total = add_broadcast(t, out, Value(places.tensor, (1, *places.axes), places.dtype))
            return dropout(t, total, self.dropout)


class WhisperWords(Part):
    """The decoder's entrance: tokens and learned positions of each of them."""

    positions: int
    dropout: float = 0.0
    padded: bool = True

    @property
    def longest_sequence(self) -> int:
        return self.positions

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        shared["labels"] = model_input(t, "labels", (b, s), INT64)
        ids = shared["input_ids"] = constant(t, "input ids", (b, s), INT64)
        with t.scope() as frame:
            words = input_leaf(t, embedding(t, ids, "embed_tokens", v, h, padded=self.padded))
            frame.local(words)
            places = constant(t, "position ids", (b, s), INT64)
            table = t.weight("embed_positions.weight", (self.positions, h), kind="embedding").value
            rows = t.op(
                "index",
                (table, places),
                (b, s, h),
                table.dtype,
                saves=(places,),
                gradients=(LIKE, None),
                costs=(Move(2 * traffic(words)),),
                backward_costs=(Move(2 * traffic(words), 2),),
            )
            frame.local(places, rows)
            if t.policy.config.attention is Attention.EAGER:
                shared["decoder mask"] = constant(t, "causal mask", (b, 1, s, s), words.dtype)
            return dropout(t, add(t, words, rows), self.dropout)


class WhisperLayer(Part):
    """Self-attention, cross-attention in the decoder, feed-forward, each after a norm; queries are
    scaled as projected, keys have no bias."""

    decoder: bool = False
    positions: int
    """Steps of the encoder."""
    width: int
    activation: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of the decoder's own tokens and of the encoder's steps."""
        return decoded(a) if self.decoder else ()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        for scope in ("self_attn", "encoder_attn") if self.decoder else ("self_attn",):
            with t.scope() as frame:
                frame.local(x)
                normed = self._normed(t, x, f"{scope}_layer_norm")
                out = self._attention(t, normed, scope, shared)
                x = add(t, x, dropout(t, out, self.dropout))
        with t.scope() as frame:
            frame.local(x)
            normed = self._normed(t, x, "final_layer_norm")
            wide = activate(t, linear(t, normed, "fc1", self.width, bias=True), self.activation)
            wide = dropout(t, wide, self.activation_dropout)
            out = linear(t, wide, "fc2", h, bias=True)
            return add(t, x, dropout(t, out, self.dropout))

    def _normed(self, t: Tape, x: Value, name: str) -> Value:
        return NORM.record(t, x, name)

    def _attention(self, t: Tape, x: Value, scope: str, shared: dict[str, Value]) -> Value:
        cross = scope == "encoder_attn"
        source = shared[ENCODED] if cross else x
        keys: Size = s if self.decoder and not cross else self.positions
        causal, queries = self.decoder and not cross, x.axes[1]
        with t.scope(scope) as frame:
            frame.local(x)
            projected = scale(t, linear(t, x, "q_proj", a * dh, bias=True))
            q = self._heads(t, projected, queries)
            frame.local(q)
            k = self._heads(t, linear(t, source, "k_proj", a * dh), keys)
            value = self._heads(t, linear(t, source, "v_proj", a * dh, bias=True), keys)
            frame.local(k, value)
            probability = self.attention_dropout
            if t.policy.config.attention is Attention.EAGER:
                mask = shared["decoder mask"] if causal else None
                out = eager_attention(
                    t,
                    q,
                    k,
                    value,
                    groups=1,
                    mask=mask,
                    dropout_p=probability,
                    fp32_softmax=False,
                )
            else:
                out = sdpa(
                    t,
                    q,
                    k,
                    value,
                    groups=1,
                    causal=causal,
                    dropout_p=probability,
                    contiguous=True,
                )
            frame.local(out)
            return linear(t, t.view(out, (b, queries, a * dh)), "out_proj", h, bias=True)

    def _heads(self, t: Tape, x: Value, length: Size) -> Value:
        return copy(t, x, (b, a, length, dh))


class WhisperHead(Part):
    """The decoder's last norm, the head without a bias, cross-entropy in the type of the logits."""

    tied_to: str = ""

    @property
    def task(self) -> str:
        return "seq2seq-lm"

    def hidden(self, t: Tape, x: Value) -> Value:
        return NORM.record(t, x, "model.decoder.layer_norm")

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            hidden = self.hidden(t, x)
            frame.local(hidden)
            weight = None
            if self.tied_to:
                with t.scope("proj_out"):
                    weight = t.weight("weight", (v, h), kind="head", tied_to=self.tied_to)
            logits = linear(t, hidden, "proj_out", v, kind="head", role=Role.LOGITS, weight=weight)
            frame.local(logits)
            return cross_entropy(t, logits, upcast=False)
