"""T5: encoder and decoder blocks with a learned relative position bias that the first block of a
stack shares with the rest.

Source: transformers 5.23 models/t5/modeling_t5.py, integrations/sdpa_attention.py
create_position_bias_mask.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64, DType
from napkinmath.base.expr import Size, symbol
from napkinmath.base.record import Record
from napkinmath.config.train_config import AdapterKind, Attention
from napkinmath.ir.cache import Cached, decoded
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import ENCODER_TOKENS, Part
from napkinmath.ir.symbols import a, b, dh, f, h, s, v
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.models.layers.activations import activate, gated
from napkinmath.models.layers.embedding import FEATURES, Entrance, with_features
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, copy, dropout, mul, rsqrt, scale, shift, softmax
from napkinmath.ops.elementwise import cast as cast_to
from napkinmath.ops.index import constant, embedding, input_leaf, model_input
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.norm import mean_square
from napkinmath.ops.routing import weigh_rows
from napkinmath.ops.whole_scores import dense_operand, rows_first

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.recording import RecordingPolicy

st = symbol("st")


def t5_norm(t: Tape, x: Value, name: str) -> Value:
    """x · rsqrt(mean of squares) in fp32, cast to the weight's type where that is 16-bit, times the
    weight (T5LayerNorm)."""
    with t.scope(name):
        weight = t.weight("weight", (h,), kind="norm").value
        inverse = rsqrt(t, shift(t, mean_square(t, cast_to(t, x, FP32))))
        normed = weigh_rows(t, x, inverse)
        return mul(
            t, weight, cast_to(t, normed, weight.dtype) if weight.dtype is not FP32 else normed
        )


class T5Embedding(Entrance):
    """The entrance of a stack: embeddings (shared by both stacks), dropout."""

    decoder: bool = False
    dropout: float = 0.1
    labels: tuple[Size, ...] = ()
    """Of an encoder without a decoder, and of a classifier; a decoder has one for each token."""
    around_images: bool = False
    """Features of images, which are there already, take the places of their tokens (BLIP-2)."""
    owner: str = "shared.weight"
    """Path of the table that both stacks share."""

    @property
    def virtual_tokens(self) -> str:
        return ENCODER_TOKENS

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return not self.around_images and policy.inputs_require_grad

    def output_is_held(self, *, training: bool) -> bool:
        return not (training and self.dropout)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        stack = "decoder" if self.decoder else "encoder"
        if self.decoder:
            shared["labels"] = model_input(t, "labels", self.labels or (b, st), INT64)
            ids = constant(t, "shifted labels", (b, st), INT64)
        else:
            ids = shared["input_ids"] = model_input(
                t, "input ids", (b, s - t.policy.virtual_tokens(AdapterKind.PROMPT)), INT64
            )
            if self.labels:
                shared["labels"] = model_input(t, "labels", self.labels, INT64)
        if self.decoder:
            with t.scope(f"{stack}.embed_tokens"):
                table = t.weight("weight", (v, h), kind="embedding", tied_to=self.owner)
            words = embedding(t, ids, "", v, h, weight=table)
        else:
            words = self._prompted(t, embedding(t, ids, "shared", v, h))
        words = input_leaf(t, words, of_pixels=self.around_images)
        if self.around_images and not self.decoder:
            words = with_features(t, words, shared[FEATURES])
        dropped = dropout(t, words, self.dropout)
        if dropped is not words:
            shared[f"{stack} embeddings"] = Value(words.tensor, words.axes, words.dtype)
        if t.policy.config.attention is Attention.EAGER and self.decoder:
            shared["decoder mask"] = constant(t, "causal mask", (b, 1, st, st), words.dtype)
        return dropped

    def _prompted(self, t: Tape, words: Value) -> Value:
        if t.policy.adapter is None or t.policy.adapter.kind is not AdapterKind.PROMPT:
            return words
        from napkinmath.lowering.virtual_tokens import with_encoder_prompt

        return with_encoder_prompt(t, words)


WHOLE = "unquantized linear"  # _keep_in_fp32_modules


class T5Attention(Record):
    """Attention with an additive bias, without scaling by the head size; keys and values of the
    encoder where `cross`."""

    decoder: bool = False
    cross: bool = False
    dropout: float = 0.1
    buckets: int = 0
    """In the first block of a stack, which makes the bias that the others read: rows of its table;
    0 in the others."""
    own: bool = False
    """Every block makes its own bias (UMT5)."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention of x, of axes (b, length, h)."""
        queries: Size = st if self.decoder else s
        keys: Size = s if self.cross or not self.decoder else st
        source = shared["encoder states"] if self.cross else x
        name = "cross bias" if self.cross else "decoder bias" if self.decoder else "encoder bias"
        cached = (
            self.decoder and not t.policy.recomputes
        )  # the decoder builds a cache in training too, unless checkpointed
        with t.scope("EncDecAttention" if self.cross else "SelfAttention") as frame:
            frame.local(x)
            q = self._heads(t, x, "q", queries)
            k, value = self._heads(t, source, "k", keys), self._heads(t, source, "v", keys)
            if cached:
                k, value = (copy(t, y, name="cache") for y in (k, value))
                t.keep(k, value)
            frame.local(q, k, value)
            if self.buckets:
                bias = self._zero_bias(t, q) if self.cross else self._bias(t, queries)
                frame.local(*((bias,) if self.own else ()))
                if not self.own:
                    shared[name] = bias
            else:
                bias = shared[name]
            if t.policy.config.attention is Attention.EAGER:
                mask = shared["decoder mask"] if self.decoder and not self.cross else None
                out = self._eager(t, q, k, value, bias, mask, dense=cached)
            else:
                out = sdpa(
                    t,
                    q,
                    k,
                    value,
                    groups=1,
                    mask=self._additive(t, bias, queries),
                    causal=False,
                    dropout_p=self.dropout,
                )
            frame.local(out)
            return linear(t, t.view(out, (b, queries, a * dh)), "o", h)

    def _bias(self, t: Tape, length: Size) -> Value:
        """compute_bias: integer tables of every pair of positions, then a look-up of one number a
        head."""
        with t.scope() as frame:
            pairs = constant(t, "relative positions", (length, length), INT64)
            frame.local(pairs)
            buckets = self._buckets(t, length)
            found = embedding(t, buckets, "relative_attention_bias", self.buckets, a)
            return t.view(found, (1, a, length, length))

    def _buckets(self, t: Tape, length: Size) -> Value:
        """_relative_position_bucket: each table dies where the next has taken its name."""

        def table(name: str, dtype: DType = INT64, *spent: Value) -> Value:
            made = constant(t, name, (length, length), dtype)
            t.touch(*(value.tensor for value in spent))
            return made

        with t.scope() as frame:
            first: Value | None = None
            if self.decoder:
                zeros = table("zeros")
                near = table("smaller of both", INT64, zeros)
                distance = table("distances", INT64, near)
            else:
                later = table("which comes later", BOOL)
                halves = table("half of each", INT64, later)
                halves = table("half of each, scaled", INT64, halves)
                first = table("buckets", INT64, halves)
                distance = table("distances")
                frame.local(first)
            small = table("which is near", BOOL)
            frame.local(distance, small)
            wide = table("distances in fp32", FP32)
            for name in ("parts of the nearest", "logarithm", "scaled", "times the buckets"):
                wide = table(name, FP32, wide)
            far = table("far buckets", INT64, wide)
            far = table("far buckets from the first", INT64, far)
            last = table("last bucket")
            far = table("far buckets within the table", INT64, far, last)
            frame.local(far)
            chosen = table("chosen buckets")
            return table("buckets", INT64, chosen) if first is None else first

    def _zero_bias(self, t: Tape, queries: Value) -> Value:
        """The bias of cross-attention, which asks for a gradient where the layer is
        checkpointed."""
        zeros = constant(t, "zero bias of cross-attention", (1, a, st, s), queries.dtype)
        zeros.requires_grad = t.policy.recomputes and not self.own
        return zeros

    def _heads(self, t: Tape, x: Value, name: str, length: Size) -> Value:
        return t.view(t.view(linear(t, x, name, a * dh), (b, length, a, dh)), (b, a, length, dh))

    def _additive(self, t: Tape, bias: Value, length: Size) -> Value:
        """The bias as SDPA's mask: made contiguous in every layer, future positions masked out
        first in the decoder."""
        if self.cross:
            return bias
        if self.decoder:
            future = constant(t, "causal pairs", (length, length), BOOL)
            bias = t.op(
                "where",
                (future, bias),
                bias.axes,
                bias.dtype,
                saves=(future,),
                gradients=(None, LIKE),
                costs=(Move(2 * traffic(bias)),),
                backward_costs=(Move(2 * traffic(bias)),),
            )
        return copy(t, bias)

    def _eager(
        self,
        t: Tape,
        q: Value,
        k: Value,
        value: Value,
        bias: Value,
        mask: Value | None,
        *,
        dense: bool,
    ) -> Value:
        scores = (b, a, q.axes[2], k.axes[2])
        with t.scope() as frame:
            weights = scale(
                t,
                bmm(
                    t,
                    dense_operand(t, q, dense=False),
                    dense_operand(t, k, dense=dense),
                    b * a,
                    q.axes[2],
                    k.axes[2],
                    dh,
                    scores,
                    name="q k^T",
                ),
            )
            weights = t.op(
                "add bias",
                (weights, bias),
                scores,
                weights.dtype,
                gradients=(PASS, LIKE),
                costs=(Move(2 * traffic(weights)),),
                backward_costs=(Move(traffic(weights, bias)),),
            )
            if mask is not None:
                weights = add(t, weights, Value(mask.tensor, scores, mask.dtype))
            weights = dropout(t, softmax(t, weights), self.dropout)
            frame.local(weights)
            t.keep(weights)
            out = bmm(
                t,
                weights,
                dense_operand(t, value, dense=dense),
                b * a,
                q.axes[2],
                dh,
                k.axes[2],
                (b, a, q.axes[2], dh),
                name="scores v",
            )
            return rows_first(t, out)


class T5Block(Part):
    """Self-attention, cross-attention in the decoder, feed-forward, each normed before and dropped
    out after."""

    decoder: bool = False
    gated: bool = False
    activation: str = "relu"
    dropout: float = 0.1
    buckets: int = 0
    """Rows of the table of relative positions, in the first block of a stack."""
    own: bool = False
    """Every block has such a table."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of the decoder's own tokens and of the encoder's."""
        return decoded(a) if self.decoder else ()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        attention = T5Attention(
            decoder=self.decoder, dropout=self.dropout, buckets=self.buckets, own=self.own
        )
        layers = [attention, attention.replace(cross=True)] if self.decoder else [attention]
        for number, layer in enumerate(layers):
            with t.scope(f"layer.{number}") as frame:
                frame.local(x)
                normed = t5_norm(t, x, "layer_norm")
                attended = layer.record(t, normed, shared)
                frame.local(normed, attended)
                x = add(t, x, dropout(t, attended, self.dropout))
        with t.scope(f"layer.{len(layers)}") as frame:
            frame.local(x)
            normed = t5_norm(t, x, "layer_norm")
            frame.local(normed)
            out = self._feed_forward(t, normed)
            frame.release(normed)  # the name is bound to the result
            frame.local(out)
            return add(t, x, dropout(t, out, self.dropout))

    def _feed_forward(self, t: Tape, x: Value) -> Value:
        with t.scope("DenseReluDense") as frame:
            if self.gated:
                frame.local(x)
                wide = gated(
                    t, linear(t, x, "wi_0", f), lambda: linear(t, x, "wi_1", f), self.activation
                )
            else:
                wide = activate(t, linear(t, x, "wi", f), self.activation)
            wide = dropout(t, wide, self.dropout)
            with t.scope("wo"):
                stored = t.weight("weight", (h, f), kind=WHOLE).tensor.dtype
            if stored.floating and stored is not wide.dtype:  # what autocast makes narrow again
                wide = cast_to(t, wide, stored)
                frame.local(wide)
            return linear(t, wide, "wo", h, kind=WHOLE)


class T5StackEnd(Part):
    """The final norm of a stack and its dropout."""

    dropout: float = 0.1

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        normed = t5_norm(t, x, "final_layer_norm")
        out = dropout(t, normed, self.dropout)
        t.touch(normed.tensor)
        return out


class T5Head(Part):
    """Optional scaling by the square root of the width, the head, cross-entropy in the logits'
    type."""

    tied_to: str = ""
    scaled: bool = False

    @property
    def task(self) -> str:
        return "seq2seq-lm"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = scale(t, x) if self.scaled else x
            with t.scope("lm_head"):
                weight = t.weight("weight", (v, h), kind="head", tied_to=self.tied_to)
            logits = linear(t, hidden, "lm_head", v, kind="head", role=Role.LOGITS, weight=weight)
            frame.local(logits, hidden)
            return cross_entropy(t, logits, upcast=False)
