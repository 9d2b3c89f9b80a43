"""Attention with an output gate (Qwen 3 Next, Qwen 3.5).

Source: transformers 5.23 models/qwen3_next/modeling_qwen3_next.py Qwen3NextAttention.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, dh, h, k, s
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.masks import mask_name
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import (
    copy,
    mul,
    sigmoid,
)
from napkinmath.ops.index import chunk, rotary
from napkinmath.ops.matmul import linear
from napkinmath.ops.rotary import rotary_partial
from napkinmath.ops.whole_scores import eager_attention


class GatedAttention(Record):
    """Grouped-query attention whose query projection also yields a sigmoid gate on the output
    (Qwen3NextAttention)."""

    bias: bool = False
    rotary_size: int = 0
    dropout: float = 0.0
    norm: Norm = Norm(kind=NormKind.RMS_GEMMA)

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of its key/value heads."""
        return keys_and_values(k)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            both = t.view(linear(t, x, "q_proj", 2 * a * dh, bias=self.bias), (b, s, a, 2 * dh))
            q, gate = chunk(t, both, (dh, dh))
            gate = copy(t, gate, (b, s, a * dh), name="reshape")
            q = self.norm.record(t, q, "q_norm")
            key = self.norm.record(
                t, t.view(linear(t, x, "k_proj", k * dh, bias=self.bias), (b, s, k, dh)), "k_norm"
            )
            value = t.view(linear(t, x, "v_proj", k * dh, bias=self.bias), (b, k, s, dh))
            q, key = t.view(q, (b, a, s, dh)), t.view(key, (b, k, s, dh))
            cos, sin = shared["cos"], shared["sin"]
            if self.rotary_size:
                q, key = rotary_partial(t, q, key, cos, sin, self.rotary_size, rotary, None)
            else:
                q, key = rotary(t, q, cos, sin), rotary(t, key, cos, sin)
            frame.local(gate, q, key, value)
            out = self._attend(t, q, key, value, shared.get(mask_name(0)))
            frame.local(out)
            gated = mul(t, t.view(out, (b, s, a * dh)), sigmoid(t, gate))
            frame.local(gated)
            return linear(t, gated, "o_proj", h, bias=self.bias)

    def _attend(self, t: Tape, q: Value, key: Value, value: Value, mask: Value | None) -> Value:
        attended = eager_attention if t.policy.config.attention is Attention.EAGER else sdpa
        return attended(
            t,
            q,
            key,
            value,
            groups=a // k,
            mask=mask,
            dropout_p=self.dropout,
            contiguous=bool(self.rotary_size),  # parts of heads put together lie heads first
        )
