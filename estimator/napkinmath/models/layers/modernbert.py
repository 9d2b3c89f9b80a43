"""ModernBERT: a bidirectional pre-norm encoder with rotary embeddings in fp32 and windows on most
layers.

Source: transformers 5.23 models/modernbert/modeling_modernbert.py, masking_utils.py
create_bidirectional_sliding_window_mask.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64, DType
from napkinmath.config.train_config import Attention
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, dh, f, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.activations import gated
from napkinmath.models.layers.attend import runs_eager
from napkinmath.models.layers.attention import split_heads
from napkinmath.models.layers.embedding import Entrance, rotary_tables
from napkinmath.models.layers.masks import mask_name
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, cast, dropout, mul
from napkinmath.ops.index import chunk, constant, embedding, input_leaf, model_input, rotate_half
from napkinmath.ops.matmul import linear
from napkinmath.ops.whole_scores import eager_attention

NORM = Norm(kind=NormKind.LAYER_NO_BIAS)


class ModernBertEmbedding(Entrance):
    """Token embeddings, LayerNorm, dropout; the masks of windows and the rotary tables of each kind
    of layer."""

    norm: Norm = NORM
    window: int = 0
    """Positions seen on each side by sliding layers; 0 where no layer slides."""
    tables: tuple[str, ...] = (" full", " sliding")
    dropout: float = 0.0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = shared["input_ids"] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", self.labels, INT64)
        shared["position ids"] = constant(t, "position ids", (1, s), INT64)
        with t.scope("embeddings"):
            words = input_leaf(t, embedding(t, ids, "tok_embeddings", v, h, padded=True))
            out = dropout(t, self.norm.record(t, words, "norm"), self.dropout)
        if self.window:
            self._mask(t, shared, out.dtype)
        for suffix in self.tables:
            rotary_tables(t, shared, dh, out.dtype, suffix)
        return out

    def _mask(self, t: Tape, shared: dict[str, Value], dtype: DType) -> None:
        """Pairs no further apart than the window, unless the sequence is shorter than it."""
        if t.policy.config.attention.needs_no_mask or not t.at_least("s", self.window):
            return
        with t.scope():
            distance = constant(t, "distance", (s, s), INT64)
            absolute = constant(t, "absolute distance", (s, s), INT64)
            t.touch(distance.tensor)
            near = constant(t, "near", (s, s), BOOL)
            t.touch(absolute.tensor)
            visible = constant(t, "visible", (s, s), BOOL)
            t.touch(near.tensor)
            if t.policy.config.attention is Attention.EAGER:
                shared[mask_name(self.window)] = constant(t, "attention mask", (b, 1, s, s), dtype)
                t.touch(visible.tensor)
            else:
                shared[mask_name(self.window)] = Value(visible.tensor, (b, 1, s, s), BOOL)


class ModernBertLayer(Part):
    """residual + attention(norm), then residual + gated feed-forward(norm); the first layer's
    attention reads the embeddings unnormed."""

    norm: Norm = NORM
    first: bool = False
    window: int = 0
    tables: str = " full"
    activation: str = "gelu"
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            attended = self._attention(
                t, x if self.first else self.norm.record(t, x, "attn_norm"), shared
            )
            frame.local(attended)
            x = add(t, x, attended)
            frame.local(x)
            return add(t, x, self._feed_forward(t, self.norm.record(t, x, "mlp_norm")))

    def _attention(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        mask = shared.get(mask_name(self.window)) if self.window else None
        with t.scope("attn") as frame:
            frame.local(x)
            packed = linear(t, x, "Wqkv", 3 * a * dh, bias=self.attention_bias)
            q, k, value = (
                split_heads(t, part, a, copies=False)
                for part in chunk(t, packed, (a * dh,) * 3, name="unbind")
            )
            frame.local(q, k, value)
            q, k = self._turn(t, q, k, shared)
            frame.local(q, k)
            if runs_eager(t, False):
                out = eager_attention(
                    t,
                    q,
                    k,
                    value,
                    groups=1,
                    mask=mask,
                    dropout_p=self.attention_dropout,
                    contiguous=False,
                )
            else:
                window = 2 * self.window + 1 if self.window else None
                out = sdpa(
                    t,
                    q,
                    k,
                    value,
                    groups=1,
                    mask=mask,
                    causal=False,
                    window=window,
                    dropout_p=self.attention_dropout,
                )
            frame.local(out)
            out = linear(t, t.view(out, (b, s, a * dh)), "Wo", h, bias=self.attention_bias)
            return dropout(t, out, self.attention_dropout)

    def _turn(self, t: Tape, q: Value, k: Value, shared: dict[str, Value]) -> tuple[Value, Value]:
        """apply_rotary_pos_emb: in fp32, cast back when both are turned."""
        cos, sin = shared[f"cos{self.tables}"], shared[f"sin{self.tables}"]
        with t.scope() as frame:
            frame.local(q, k)
            turned: list[Value] = []
            for x in (q, k):
                first = mul(t, cast(t, x, FP32), cos)
                turned.append(add(t, first, mul(t, rotate_half(t, cast(t, x, FP32)), sin)))
                frame.local(turned[-1])
            return cast(t, turned[0], q.dtype), cast(t, turned[1], k.dtype)

    def _feed_forward(self, t: Tape, x: Value) -> Value:
        with t.scope("mlp") as frame:
            frame.local(x)
            both = linear(t, x, "Wi", 2 * f, bias=self.mlp_bias)
            wide, gate = chunk(t, both, (f, f))
            frame.local(wide, gate)
            product = gated(t, wide, lambda: gate, self.activation)
            product = dropout(t, product, self.mlp_dropout)
            return linear(t, product, "Wo", h, bias=self.mlp_bias)


class ModernBertEnd(Part):
    """The encoder's final norm."""

    norm: Norm = NORM

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return self.norm.record(t, x, "final_norm")
