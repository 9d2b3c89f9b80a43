"""Self-attention with grouped key/value heads and rotary embeddings, as transformers' LlamaAttention and its kin."""

from __future__ import annotations

from napkinmath.catalog.layers.norm import Norm
from napkinmath.catalog.layers.symbols import a, b, dh, h, k, s
from napkinmath.expr import Size
from napkinmath.ledger import Value
from napkinmath.ops.attention import eager_attention, sdpa
from napkinmath.ops.index import rotary
from napkinmath.ops.matmul import linear
from napkinmath.record import Record
from napkinmath.tape import Tape
from napkinmath.train_config import Attention


class GroupedQueryAttention(Record):
    """q, k, v projections, rotary embedding, attention, output projection."""

    grouped: bool = False
    """Fewer key/value heads than query heads."""
    bias: bool = False
    output_bias: bool = False
    rotary: bool = True
    window: int = 0
    """Tokens a query sees; 0 is all."""
    head_norm: Norm | None = None
    """RMSNorm of each query and key head (Qwen3, Gemma 3)."""
    dropout: float = 0.0
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            q = self._heads(t, x, 0, a)
            key = self._heads(t, x, 1, k if self.grouped else a)
            value = t.view(linear(t, x, self.names[2], (k if self.grouped else a) * dh, bias=self.bias), (b, k if self.grouped else a, s, dh))
            if self.rotary:
                q, key = self._rotate(t, q, key, shared)
            frame.local(q, key, value)
            out = self._attend(t, q, key, value, shared)
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), self.names[3], h, bias=self.output_bias)

    def _heads(self, t: Tape, x: Value, which: int, heads: Size) -> Value:
        projected = t.view(linear(t, x, self.names[which], heads * dh, bias=self.bias), (b, s, heads, dh))
        if self.head_norm is not None:
            projected = self.head_norm.record(t, projected, ("q_norm", "k_norm")[which])
        return t.view(projected, (b, heads, s, dh), copies_gradient=self.rotary and self.head_norm is None)

    def _rotate(self, t: Tape, q: Value, key: Value, shared: dict[str, Value]) -> tuple[Value, Value]:
        with t.scope() as frame:
            frame.local(q, key)
            turned = rotary(t, q, shared["cos"], shared["sin"])
            frame.local(turned)
            return turned, rotary(t, key, shared["cos"], shared["sin"])

    def _attend(self, t: Tape, q: Value, key: Value, value: Value, shared: dict[str, Value]) -> Value:
        groups: Size = a // k if self.grouped else 1
        if t.policy.config.attention is Attention.EAGER:
            return eager_attention(t, q, key, value, groups=groups, mask=shared.get("mask"), dropout_p=self.dropout)
        return sdpa(t, q, key, value, groups=groups, mask=shared.get("mask"), window=self.window or None, dropout_p=self.dropout)
