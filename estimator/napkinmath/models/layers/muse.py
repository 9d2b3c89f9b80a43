"""Muse Glimmer's attention: query and key heads normed without weights, turned in layers with a
window only, a gate of its own on the output.

Source: transformers 5.23 models/muse_glimmer/modeling_muse_glimmer.py MuseGlimmerTextAttention.
"""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, dh, h, k, s
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.attend import attend
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.elementwise import mul, scale, sigmoid
from napkinmath.ops.index import rotary
from napkinmath.ops.matmul import linear

PLAIN = Norm(kind=NormKind.RMS_POWER_PLAIN)


class MuseAttention(Record):
    """Grouped-query attention whose output a projection of the input gates."""

    grouped: bool = True
    bias: bool = False
    window: int = 0
    """Tokens a query sees; 0 is all."""
    turned: bool = True
    """Queries and keys are rotated."""
    dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of its key/value heads."""
        return keys_and_values(k, window=self.window)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            q, key, value = (
                self._heads(t, x, name, heads) for name, heads in (("q", a), ("k", k), ("v", k))
            )
            frame.local(value)
            q = scale(t, PLAIN.record(t, q, "qk_norm"))
            frame.local(q)
            key = PLAIN.record(t, key, "qk_norm")
            if self.turned:
                frame.release(q)
                with t.scope() as inner:
                    inner.local(q, key)
                    cos, sin = shared["cos"], shared["sin"]
                    q = rotary(t, q, cos, sin)
                    inner.local(q)
                    key = rotary(t, key, cos, sin)
            frame.local(q, key)
            out = attend(
                t,
                q,
                key,
                value,
                shared,
                groups=a // k if self.grouped else 1,
                window=self.window,
                dropout_p=self.dropout,
            )
            out = t.view(out, (b, s, a * dh))
            frame.local(out)
            gate = sigmoid(t, linear(t, x, "gate_proj", a * dh))
            gated = mul(t, out, gate)
            frame.release(out)
            frame.local(gated)
            return linear(t, gated, "o_proj", h, bias=self.bias)

    def _heads(self, t: Tape, x: Value, name: str, heads: Size) -> Value:
        out = linear(t, x, f"{name}_proj", heads * dh, bias=self.bias)
        return t.view(out, (b, heads, s, dh))
