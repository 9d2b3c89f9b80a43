"""Bidirectional encoders with learned positions and post-norm layers: BERT, RoBERTa, DistilBERT."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, dh, f, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.embedding import Entrance
from napkinmath.models.layers.masks import causal_masks, mask_name
from napkinmath.models.layers.mlp import activate
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, add_broadcast, dropout
from napkinmath.ops.index import constant, embedding, input_leaf, model_input
from napkinmath.ops.index import rotary as turned
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.whole_scores import eager_attention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.models.layers.decoder import Sublayer


class BidirectionalAttention(Record):
    """Attention of every position to every other: projections with bias, no mask, softmax in the
    model's type.

    Source: transformers 5.23 models/bert/modeling_bert.py BertSelfAttention,
    models/vit/modeling_vit.py ViTAttention.
    """

    names: tuple[str, str, str] = ("query", "key", "value")
    heads: Size = a
    size: Size = dh
    bias: tuple[bool, bool, bool] = (True, True, True)
    dropout: float = 0.0
    fp32_softmax: bool = False
    mask: str = ""
    """Name of a shared mask, none where empty."""
    causal: bool = False
    """Each position sees those before it (BERT's kin under `is_decoder`)."""
    rotary: bool = False
    """Queries and keys are turned by the tower's tables, in the model's type (Pixtral)."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value] | None = None) -> Value:
        """Attention over x of axes (rows, length, width); returns (rows, length, heads · size),
        before any output projection."""
        rows, length, _ = x.axes
        with t.scope() as frame:
            frame.local(x)
            q, k, v_ = (
                self._heads(t, x, name, bias)
                for name, bias in zip(self.names, self.bias, strict=True)
            )
            if self.rotary and shared is not None:
                q, k = self.turn(t, q, k, shared)
            frame.local(q, k, v_)
            mask = None if shared is None or not self.mask else shared.get(self.mask)
            if self.causal and shared is not None:
                mask = shared.get(mask_name(0))
            if t.policy.config.attention is Attention.EAGER:
                out = eager_attention(
                    t,
                    q,
                    k,
                    v_,
                    groups=1,
                    mask=mask,
                    dropout_p=self.dropout,
                    fp32_softmax=self.fp32_softmax,
                )
            else:
                out = sdpa(
                    t,
                    q,
                    k,
                    v_,
                    groups=1,
                    mask=mask,
                    causal=self.causal and mask is None,
                    dropout_p=self.dropout,
                )
            return t.view(out, (rows, length, self.heads * self.size))

    def turn(self, t: Tape, q: Value, k: Value, shared: dict[str, Value]) -> tuple[Value, Value]:
        """Queries and keys turned by the tower's tables."""
        cos, sin = shared["vision cos"], shared["vision sin"]
        return turned(t, q, cos, sin), turned(t, k, cos, sin)

    def _heads(self, t: Tape, x: Value, name: str, bias: bool) -> Value:
        rows, length, _ = x.axes
        projected = t.view(
            linear(t, x, name, self.heads * self.size, bias=bias),
            (rows, length, self.heads, self.size),
        )
        return t.view(projected, (rows, self.heads, length, self.size))


class EncoderEmbedding(Entrance):
    """Token, position and segment embeddings, LayerNorm, dropout (BertEmbeddings)."""

    positions: int
    segments: int = 0
    """Token types; 0 is none (DistilBERT)."""
    dropout: float = 0.1
    padded: bool = True
    """Word embeddings have a padding index."""
    position_of_each_token: bool = False
    """Positions are counted from the ids, a row of them for every sequence (RoBERTa), not one row
    for all."""
    causal: bool = False
    """The layers are given a causal mask."""
    width: Size = h

    @property
    def longest_sequence(self) -> int:
        return self.positions - (
            2 if self.position_of_each_token else 0
        )  # rows up to the padding index are not used

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = shared["input_ids"] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", self.labels, INT64)
        for buffer in ("position_ids", "token_type_ids")[: 2 if self.segments else 1]:
            t.weight(buffer, (1, self.positions), dtype=INT64, buffer=True)
        with t.scope() as frame:
            words = embedding(t, ids, "word_embeddings", v, self.width, padded=self.padded)
            words = input_leaf(t, words)
            frame.local(words)
            total = words
            if self.segments:
                segments = embedding(
                    t,
                    constant(t, "token type ids", (b, s), INT64),
                    "token_type_embeddings",
                    self.segments,
                    self.width,
                )
                frame.local(segments)
                total = add(t, total, segments)
            rows = b if self.position_of_each_token else 1
            places = embedding(
                t,
                constant(t, "position ids", (rows, s), INT64),
                "position_embeddings",
                self.positions,
                self.width,
                padded=self.padded and self.position_of_each_token,
            )
            frame.local(places)
            total = (
                add(t, total, places)
                if self.position_of_each_token
                else add_broadcast(t, total, places)
            )
            out = dropout(t, layer_norm(t, total, name="LayerNorm"), self.dropout)
            if self.causal:
                causal_masks(t, shared, out.dtype)
            return out


class BertLayer(Part):
    """Attention, residual, norm; feed-forward, residual, norm (BertLayer, RobertaLayer)."""

    attention: Sublayer = BidirectionalAttention()
    activation: str = "gelu"
    dropout: float = 0.1

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope("attention") as frame:
            frame.local(x)
            with t.scope("self"):
                attended = self.attention.record(t, x, shared)
            middle = self._output(t, attended, x)
        with t.scope() as frame:
            frame.local(x, middle)
            with t.scope("intermediate"):
                wide = activate(t, linear(t, middle, "dense", f, bias=True), self.activation)
            frame.local(wide)
            return self._output(t, wide, middle)

    def _output(self, t: Tape, y: Value, residual: Value) -> Value:
        with t.scope("output") as frame:
            dropped = dropout(t, linear(t, y, "dense", h, bias=True), self.dropout)
            frame.local(dropped)
            return layer_norm(t, add(t, dropped, residual), name="LayerNorm")


class DistilBertLayer(Part):
    """DistilBERT's TransformerBlock: the output projection inside the attention, dropout after the
    feed-forward only."""

    attention: BidirectionalAttention = BidirectionalAttention(names=("q_lin", "k_lin", "v_lin"))
    activation: str = "gelu"
    dropout: float = 0.1

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            with t.scope("attention"):
                attended = linear(t, self.attention.record(t, x), "out_lin", h, bias=True)
            middle = layer_norm(t, add(t, attended, x), name="sa_layer_norm")
            t.touch(attended.tensor)
            frame.local(middle)
            with t.scope("ffn"):
                wide = activate(t, linear(t, middle, "lin1", f, bias=True), self.activation)
                out = dropout(t, linear(t, wide, "lin2", h, bias=True), self.dropout)
            frame.local(out)
            return layer_norm(t, add(t, out, middle), name="output_layer_norm")
