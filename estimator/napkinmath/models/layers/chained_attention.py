"""Attention layers of older models, which transformers runs eager only (GPT-Neo, GPT-J, CodeGen,
BLOOM, MPT) or in a way of their own (Falcon)."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, dh, h, s
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.attention import split_heads
from napkinmath.ops.attention_chains import (
    bloom_attention,
    clamped_scores,
    fp32_scores,
    mpt_attention,
)
from napkinmath.ops.elementwise import add, cast, clamp_, copy, dropout, mul, scale
from napkinmath.ops.index import chunk, concatenate, constant, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.rotary import rotate_pairs


class GptNeoAttention(Record):
    """Unscaled fp32 scores under a stored causal triangle, which is banded in local layers
    (models/gpt_neo GPTNeoSelfAttention)."""

    positions: int
    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of all tokens; a local layer's mask bands them."""
        return keys_and_values(a)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("attn"), t.scope("attention") as frame:
            frame.local(x)
            triangle = t.weight(
                "bias", (self.positions, self.positions), dtype=BOOL, buffer=True
            ).value
            q, key, value = (linear(t, x, name, a * dh) for name in ("q_proj", "k_proj", "v_proj"))
            q, key, value = (split_heads(t, part, a, copies=True) for part in (q, key, value))
            frame.local(q, key, value)
            out = fp32_scores(
                t, q, key, value, mask=shared.get("mask"), triangle=triangle, dropout_p=self.dropout
            )
            frame.local(out)
            return dropout(
                t,
                linear(t, t.view(out, (b, s, a * dh)), "out_proj", h, bias=True),
                self.output_dropout,
            )


class GptJAttention(Record):
    """Part of each head rotated in pairs before heads and positions change places, fp32 scores
    (models/gptj, models/codegen)."""

    positions: int
    rotary_size: int
    packed: bool = False
    """CodeGen: one linear in four shards, each of which holds queries, values and keys; rotation in
    fp32."""
    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of every head."""
        return keys_and_values(a)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("attn") as frame:
            frame.local(x)
            q, key, value = self._packed(t, frame, x) if self.packed else self._separate(t, x)
            cos, sin = self._tables(t, frame, q)
            frame.local(q, key, cos, sin)
            pieces = [
                [
                    slice_of(t, part, (b, s, a, size))
                    for size in (self.rotary_size, dh - self.rotary_size)
                ]
                for part in (key, q)
            ]
            frame.local(*(piece for pair in pieces for piece in pair))
            turned = [self._turn(t, pair[0], cos, sin) for pair in pieces]
            frame.local(*turned)
            key, q = (
                self._joined(t, first, pair[1]) for first, pair in zip(turned, pieces, strict=True)
            )
            q, key = t.view(q, (b, a, s, dh)), t.view(key, (b, a, s, dh))
            frame.local(q, key, value)
            out = fp32_scores(
                t, q, key, value, mask=shared.get("mask"), scaled=True, dropout_p=self.dropout
            )
            frame.local(out)
            return dropout(
                t, linear(t, t.view(out, (b, s, a * dh)), "out_proj", h), self.output_dropout
            )

    def _separate(self, t: Tape, x: Value) -> tuple[Value, Value, Value]:
        q, key, value = (linear(t, x, name, a * dh) for name in ("q_proj", "k_proj", "v_proj"))
        return (
            t.view(q, (b, s, a, dh)),
            t.view(key, (b, s, a, dh)),
            split_heads(t, value, a, copies=True),
        )

    def _packed(self, t: Tape, frame: Scope, x: Value) -> tuple[Value, Value, Value]:
        qkv = linear(t, x, "qkv_proj", 3 * a * dh)
        frame.local(qkv)
        q, value, key = (
            copy(t, part, (b, s, a, dh), name="shards merged")
            for part in chunk(t, qkv, (a * dh,) * 3, name="split")
        )
        return q, key, t.view(value, (b, a, s, dh))

    def _tables(self, t: Tape, frame: Scope, q: Value) -> tuple[Value, Value]:
        """cos and sin of this layer, looked up in a table of sines that GPT-J copies whole
        first."""
        size = self.rotary_size
        t.weight("embed_positions", (self.positions, size), dtype=FP32, buffer=True)
        if not self.packed:
            frame.local(
                constant(t, "positions repeated", (1, self.positions, size), FP32),
                constant(t, "ids repeated", (1, s, size), INT64),
            )
        found = constant(t, "sines and cosines", (1, s, size), FP32)
        table = found if self.packed else cast(t, found, q.dtype)
        t.keep(table)
        return table, table

    def _turn(self, t: Tape, x: Value, cos: Value, sin: Value) -> Value:
        axes = (1, s, 1, self.rotary_size)
        with t.scope() as frame:
            sin, cos = (
                constant(t, "interleaved sin", axes, sin.dtype),
                constant(t, "interleaved cos", axes, cos.dtype),
            )
            frame.local(x, sin, cos)
            return add(t, mul(t, x, cos), mul(t, rotate_pairs(t, x), sin))

    def _joined(self, t: Tape, turned: Value, rest: Value) -> Value:
        """The rotated part before the rest, in the wider of their types."""
        axes = (b, s, a, dh)
        if turned.dtype is rest.dtype:
            return concatenate(t, (turned, rest), axes)
        return t.op("cat", (turned, rest), axes, turned.dtype, gradients=("pass", "like"))


class BloomAttention(Record):
    """q, k and v selected within each head, ALiBi as the addend of the score product (models/bloom
    BloomAttention)."""

    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of every head."""
        return keys_and_values(a)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attention") as frame:
            frame.local(x)
            packed = linear(t, x, "query_key_value", 3 * a * dh, bias=True)
            frame.local(packed)
            viewed = t.view(packed, (b, s, a, 3, dh))
            q, key, value = (
                t.view(slice_of(t, viewed, (b, s, a, dh)), (b, a, s, dh)) for _ in range(3)
            )
            out = bloom_attention(
                t,
                frame,
                q,
                key,
                value,
                alibi=shared["alibi"],
                mask=shared.get("mask"),
                dropout_p=self.dropout,
            )
            frame.local(out)
            return dropout(
                t,
                linear(t, t.view(out, (b, s, a * dh)), "dense", h, bias=True),
                self.output_dropout,
            )


class MptAttention(Record):
    """q, k and v as chunks of one linear, an fp32 ALiBi bias, a bool mask (models/mpt
    MptAttention)."""

    dropout: float = 0.0
    clipped: bool = False
    bias: bool = False
    alibi: bool = True

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of every head."""
        return keys_and_values(a)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("attn") as frame:
            frame.local(x)
            packed = linear(t, x, "Wqkv", 3 * a * dh, bias=self.bias)
            if self.clipped:
                packed = clamp_(t, packed)
            frame.local(packed)
            q, key, value = (
                split_heads(t, part, a, copies=True) for part in chunk(t, packed, (a * dh,) * 3)
            )
            out = mpt_attention(
                t,
                frame,
                q,
                key,
                value,
                alibi=shared.get("alibi"),
                mask=shared.get("bool mask"),
                dropout_p=self.dropout,
            )
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "out_proj", h, bias=self.bias)


class XglmAttention(Record):
    """Heads folded into the batch, scores clamped from below, softmax in the model's type
    (models/xglm XGLMAttention)."""

    dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of every head."""
        return keys_and_values(a)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            q = scale(t, linear(t, x, "q_proj", a * dh, bias=True))
            key, value = (linear(t, x, name, a * dh, bias=True) for name in ("k_proj", "v_proj"))
            q, key, value = (split_heads(t, part, a, copies=True) for part in (q, key, value))
            out = clamped_scores(t, q, key, value, mask=shared.get("mask"), dropout_p=self.dropout)
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "out_proj", h, bias=True)
