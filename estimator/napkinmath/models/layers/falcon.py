"""Falcon's attention and layer, in the forms of its sizes: one key/value head, grouped heads
expanded, or as many as query heads."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.dtypes import BOOL, DType
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, dh, h, k, s, v
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.attend import attend, runs_eager
from napkinmath.models.layers.embedding import Entrance, rotary_tables, token_ids
from napkinmath.models.layers.masks import causal_masks, visible_positions
from napkinmath.models.layers.mlp import PlainMlp
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.attention_chains import falcon_attention
from napkinmath.ops.elementwise import add, add_, cast, copy, dropout
from napkinmath.ops.index import constant, embedding, input_leaf, rotary, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.whole_scores import math_attention

KIND = "linear that adds its bias"  # FalconLinear


class FalconHeads(str, Enum):
    """How queries, keys and values lie in the packed projection."""

    SINGLE = "one key/value head behind the queries"
    GROUPED = "groups of queries with a key and a value each, expanded"
    FULL = "a query, key and value a head"


class FalconAttention(Record):
    """models/falcon FalconAttention.forward."""

    heads: FalconHeads = FalconHeads.SINGLE
    bias: bool = False
    alibi: bool = False
    dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values, which transformers caches expanded to every query head of a group."""
        return (
            keys_and_values(a, paged=k)
            if self.heads is FalconHeads.GROUPED
            else keys_and_values(1 if self.heads is FalconHeads.SINGLE else a)
        )

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        width: Size = (
            3 * a
            if self.heads is FalconHeads.FULL
            else a + 2
            if self.heads is FalconHeads.SINGLE
            else a + 2 * k
        )
        with t.scope("self_attention") as frame:
            frame.local(x)
            packed = linear(t, x, "query_key_value", width * dh, bias=self.bias, kind=KIND)
            frame.local(packed)
            q, key, value = self._split(t, packed)
            if not self.alibi:
                with t.scope() as inner:
                    inner.local(q, key)
                    q = rotary(t, q, shared["cos"], shared["sin"])
                    inner.local(q)
                    key = rotary(t, key, shared["cos"], shared["sin"])
            frame.local(q, key, value)
            out = self._attend(t, frame, q, key, value, shared, x.dtype)
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "dense", h, bias=self.bias, kind=KIND)

    def _split(self, t: Tape, packed: Value) -> tuple[Value, Value, Value]:
        if self.heads is FalconHeads.FULL:
            viewed = t.view(packed, (b, s, a, 3, dh))
            q, key, value = (
                t.view(slice_of(t, viewed, (b, s, a, dh)), (b, a, s, dh)) for _ in range(3)
            )
            return q, key, value
        count: Size = 1 if self.heads is FalconHeads.SINGLE else k
        q = slice_of(t, packed, (b, s, a, dh))
        key, value = (
            copy(t, slice_of(t, packed, (b, s, count, dh)), name="indexed head") for _ in range(2)
        )
        if self.heads is FalconHeads.GROUPED:
            with t.scope() as frame:
                frame.local(key, value)
                q = copy(t, q, name="heads flattened")
                key, value = (self._expanded(t, part) for part in (key, value))
        rows: tuple[Size, ...] = (b, a if self.heads is FalconHeads.GROUPED else 1, s, dh)
        return t.view(q, (b, a, s, dh)), t.view(key, rows), t.view(value, rows)

    def _expanded(self, t: Tape, part: Value) -> Value:
        """Heads broadcast over their group and flattened into a copy; the gradient is summed."""
        return t.op("broadcast", (part,), (b, s, a, dh), part.dtype, gradients=("like",))

    def _attend(
        self,
        t: Tape,
        frame: Scope,
        q: Value,
        key: Value,
        value: Value,
        shared: dict[str, Value],
        dtype: DType,
    ) -> Value:
        if runs_eager(t, False):
            return falcon_attention(
                t,
                frame,
                q,
                key,
                value,
                mask=shared["mask"],
                alibi=shared.get("alibi"),
                dtype=dtype,
                dropout_p=self.dropout,
            )
        if (
            self.heads is FalconHeads.SINGLE and t.known(a) > 1
        ):  # SDPA is called without enable_gqa, so that no fused kernel takes a single head
            q, key, value = (cast(t, x, t.policy.attended_dtype(x.dtype)) for x in (q, key, value))
            return math_attention(t, q, key, value, groups=1, mask=shared.get("mask"))
        return attend(
            t, q, key, value, shared, groups=1, dropout_p=self.dropout if self.alibi else 0.0
        )


class FalconEmbedding(Entrance):
    """Token embeddings, rotary tables whether used or not, and a mask in every case, with ALiBi one
    of b·a·s² (models/falcon FalconModel.forward)."""

    alibi: bool = False
    padded: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = token_ids(t, shared, self.labels)
        out = input_leaf(t, embedding(t, ids, "word_embeddings", v, h, padded=self.padded))
        if self.alibi:
            shared["alibi"] = constant(t, "alibi", (b * a, 1, s), out.dtype)
        causal_masks(t, shared, out.dtype)
        if runs_eager(t, False):
            plain = shared.pop("mask")
        else:
            visible = visible_positions(t, 0)
            plain = Value(visible.tensor, (b, 1, s, s), BOOL)
        shared["mask"] = plain
        if self.alibi:
            shared["mask"] = constant(t, "alibi under the mask", (b, a, s, s), out.dtype)
            t.touch(plain.tensor)
        rotary_tables(t, shared, dh, out.dtype)
        return out


class FalconLayer(Part):
    """models/falcon FalconDecoderLayer.forward."""

    attention: FalconAttention
    mlp: PlainMlp
    norm: Norm
    parallel: bool = True
    two_norms: bool = False
    """Attention and feed-forward have a norm each (ln_attn, ln_mlp), both made first."""
    attention_dropout: float = 0.0
    dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What its attention keeps."""
        return self.attention.cached

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            first = self.norm.record(t, x, "ln_attn" if self.two_norms else "input_layernorm")
            second = self.norm.record(t, x, "ln_mlp") if self.two_norms else first
            frame.local(first, second)
            attended = self.attention.record(t, first, shared)
            frame.local(attended)
            residual = x
            if not self.parallel:
                residual = add(t, x, dropout(t, attended, self.attention_dropout))
                frame.local(residual)
                second = self.norm.record(t, residual, "post_attention_layernorm")
                frame.local(second)
            fed = self.mlp.record(t, second, shared)
            frame.local(fed)
            if self.parallel:
                fed = add_(t, fed, attended)
            return add(t, residual, dropout(t, fed, self.dropout))
