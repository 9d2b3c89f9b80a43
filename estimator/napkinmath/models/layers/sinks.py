"""GPT-OSS attention: grouped heads with one learned sink a head in the softmax, full and sliding
layers in turn."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Role, Value
from napkinmath.ir.symbols import a, b, dh, h, k, s
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.masks import mask_name
from napkinmath.ops.attention import fused
from napkinmath.ops.elementwise import add, cast, copy, dropout, scale, softmax
from napkinmath.ops.index import concatenate, repeat_heads, slice_of
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.rotary import rotary_halves


class SinkAttention(Record):
    """transformers has no SDPA form of it: eager runs unless a flash kernel that knows sinks is
    asked for.

    Source: transformers 5.23 models/gpt_oss/modeling_gpt_oss.py GptOssAttention,
    eager_attention_forward.
    """

    bias: bool = True
    window: int = 0
    dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values; the sinks are weights."""
        return keys_and_values(k, window=self.window)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            sinks = t.weight("sinks", (a,)).value
            named = (("q_proj", a), ("k_proj", k), ("v_proj", k))
            fused_ones = self._fused(t, x, tuple((name, heads * dh) for name, heads in named))
            q, key, value = (
                self._heads(t, made, heads)
                for made, (_, heads) in zip(
                    fused_ones or [self._projected(t, x, *one) for one in named], named, strict=True
                )
            )
            turned = rotary_halves(t, q, shared["cos"], shared["sin"])
            frame.local(turned)
            keys = rotary_halves(t, key, shared["cos"], shared["sin"])
            t.touch(q.tensor, key.tensor)
            frame.local(keys, value)
            chosen = t.policy.config.attention
            if chosen.needs_no_mask or chosen is Attention.FLASH:
                kernel = "flex" if chosen is Attention.FLEX else "flash"
                out = fused(t, kernel, turned, keys, value, causal=True, window=self.window or None)
            else:
                out = self._eager(t, turned, keys, value, sinks, shared[mask_name(self.window)])
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "o_proj", h, bias=self.bias)

    def _projected(self, t: Tape, x: Value, name: str, heads: Size) -> Value:
        return linear(t, x, name, heads * dh, bias=self.bias)

    def _fused(self, t: Tape, x: Value, named: tuple[tuple[str, Size], ...]) -> list[Value]:
        """All three out of one patched operation, where there is one for them."""
        if not t.policy.patches("qkv"):
            return []
        from napkinmath.lowering.patched_linears import fused_projections

        return fused_projections(t, x, named, bias=self.bias)

    def _heads(self, t: Tape, projected: Value, heads: Size) -> Value:
        split = t.view(projected, (b, s, heads, dh))
        return t.view(split, (b, heads, s, dh), copies_gradient=True)

    def _eager(
        self, t: Tape, q: Value, key: Value, value: Value, sinks: Value, mask: Value
    ) -> Value:
        scores, combined = (b, a, s, s), (b, a, s, s + 1)
        with t.scope() as frame:
            keys, values = (repeat_heads(t, x, a // k, (b, a, s, dh)) for x in (key, value))
            frame.local(keys, values)
            weights = scale(t, bmm(t, q, keys, b * a, s, s, dh, scores, name="q k^T"))
            weights = add(t, weights, Value(mask.tensor, scores, mask.dtype))
            columns = t.view(sinks, (b, a, s, 1), "expand sinks", copies_gradient=True)
            logits = subtract_row_maximum(t, concatenate(t, (weights, columns), combined))
            frame.local(logits)
            probabilities = softmax(t, logits, dtype=logits.dtype)
            frame.local(probabilities)
            kept = cast(
                t, dropout(t, slice_of(t, probabilities, scores), self.dropout), value.dtype
            )
            t.touch(weights.tensor)
            frame.local(kept)
            out = bmm(t, kept, values, b * a, s, dh, s, (b, a, s, dh), name="scores v")
            return copy(t, out, (b, s, a, dh))


def subtract_row_maximum(t: Tape, x: Value) -> Value:
    """x - x.max(-1, keepdim=True).values: keeps where the maxima were; backward negates, sums a
    row, scatters into zeros like x."""
    indices = t.tensor("places of the maxima", (*x.axes[:-1], 1), INT64)
    maxima = t.tensor("maxima", (*x.axes[:-1], 1), x.dtype)
    rows = Value(maxima, maxima.axes, x.dtype, x.requires_grad)
    found = t.gradient_of(x) if x.requires_grad else None
    t.append(
        "max",
        (x,),
        (rows, Value(indices, indices.axes, INT64)),
        forward=((ALLOC, maxima), (ALLOC, indices)),
        saves=(indices,) if found else (),
        costs=(Move(traffic(x)),),
        backward=((ALLOC, found),) if found else (),
        gradients=(Gradient(x, found),) if found else (),
        backward_costs=(Move(2 * traffic(x), 2),),
    )
    negated = t.tensor("negated gradient", x.axes, x.dtype, Role.WORKSPACE)
    out = t.op(
        "sub rows",
        (x, rows),
        x.axes,
        x.dtype,
        gradients=("pass", LIKE),
        costs=(Move(2 * traffic(x)),),
        backward_temporaries=(negated,),
        backward_costs=(Move(3 * traffic(x), 2),),
    )
    return out
