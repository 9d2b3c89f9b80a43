"""Attention of libraries that project queries, keys and values by one linear: litgpt's
CausalSelfAttention.

Source: litgpt 0.4 model.py CausalSelfAttention, lora.py LoRAQKVLinear.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Role, Value
from napkinmath.ir.symbols import a, b, dh, h, k, s
from napkinmath.ir.tape import Tape
from napkinmath.lowering.adapters import lora_weight
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, cast, copy, dropout, scale
from napkinmath.ops.index import constant, repeat_heads, rotary, slice_of
from napkinmath.ops.matmul import dense_linear, linear
from napkinmath.ops.whole_scores import eager_attention

PROJECTIONS = ("query", "key", "value")


class FusedQkvAttention(Record):
    """One linear for q, k and v; grouped heads expanded to copies; rotary in fp32, cast back,
    concatenated with what is not rotated."""

    bias: bool = False
    rotary_size: int = 0
    """Rotated part of each head; 0 is the whole head."""
    capped: bool = False
    """Scores pass through a tanh and stay in memory."""
    scope: str = "attn"
    names: tuple[str, str] = ("attn", "proj")

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of its groups."""
        return keys_and_values(k)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            packed = self._packed(t, x)
            q, key, value = self._split(t, packed)
            q, key = self._turn(t, q, shared), self._turn(t, key, shared)
            frame.local(q, key, value)
            out = self._attend(t, q, key, value)
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), self.names[1], h, bias=self.bias)

    def _packed(self, t: Tape, x: Value) -> Value:
        out = linear(t, x, self.names[0], (a + 2 * k) * dh, bias=self.bias)
        adapter = t.policy.adapter
        enabled = [
            p
            for p in PROJECTIONS
            if adapter is not None and (p in adapter.targets or adapter.targets == ("all-linear",))
        ]
        if adapter is None or not enabled:
            return out
        widths = {"query": a * dh, "key": k * dh, "value": k * dh}
        outputs: Size = 0
        for name in enabled:
            outputs = widths[name] + outputs
        with t.scope(self.names[0]), t.scope("lora"):
            first = lora_weight(t, "lora_A", (adapter.rank * len(enabled), x.axes[-1]))
            second = lora_weight(t, "lora_B", (outputs, adapter.rank))
        low = dense_linear(
            t, dropout(t, x, adapter.dropout, of_adapter=True), first, None, label="A x"
        )
        update = dense_linear(t, t.view(low, (b, s, adapter.rank)), second, None, label="B A x")
        if len(enabled) < len(
            PROJECTIONS
        ):  # zero_pad: zeros, and index_copy_ of the update into them, which keeps the update
            update = t.op(
                "index_copy_",
                (update,),
                out.axes,
                update.dtype,
                saves=(update,),
                gradients=("like",),
                costs=(Move(traffic(update, out)),),
                backward_costs=(Move(traffic(update, out)),),
            )
        return add(t, out, scale(t, update))

    def _split(self, t: Tape, packed: Value) -> tuple[Value, Value, Value]:
        """Views of the packed projection where heads are not grouped, copies where they are."""
        grouped = t.known(a) != t.known(k)
        whole = self._shared_gradient(t, packed)
        q, key, value = (
            Value(whole.tensor, (b, heads, s, dh), whole.dtype, whole.requires_grad)
            for heads in (a, k, k)
        )
        self._views(t, whole, (q, key, value))
        if grouped:
            q = copy(t, q)
            key, value = (
                repeat_heads(t, x, a // k, (b, a, s, dh), copies=True) for x in (key, value)
            )
        return q, key, value

    def _shared_gradient(self, t: Tape, packed: Value) -> Value:
        return t.view(packed, (b, s, k, a // k + 2, dh))

    def _views(self, t: Tape, whole: Value, parts: tuple[Value, ...]) -> None:
        """split: the gradients of the parts are concatenated into one of the whole."""
        joined = t.gradient_of(whole) if whole.requires_grad else None
        t.append(
            "split",
            (whole,),
            parts,
            forward=(),
            backward=((ALLOC, joined),) if joined else (),
            gradients=(Gradient(whole, joined),) if joined else (),
            backward_costs=(Move(2 * traffic(whole)),),
        )

    def _turn(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        with t.scope() as frame:
            frame.local(x)
            part = slice_of(t, x, (*x.axes[:-1], self.rotary_size)) if self.rotary_size else x
            turned = cast(t, rotary(t, part, shared["cos"], shared["sin"]), x.dtype)
            frame.local(turned)
            return t.op(
                "cat",
                (turned, x),
                x.axes,
                x.dtype,
                gradients=("pass", "like" if self.rotary_size else None),
                costs=(Move(2 * traffic(x)),),
            )

    def _attend(self, t: Tape, q: Value, key: Value, value: Value) -> Value:
        if not self.capped:
            return sdpa(t, q, key, value, groups=1)
        mask = constant(t, "causal mask", (s, s), q.dtype)
        return eager_attention(t, q, key, value, groups=1, mask=mask, capped=True)


def fp32_tables(t: Tape, shared: dict[str, Value], size: Size) -> None:
    """cos and sin buffers in fp32, remade after the model was cast."""
    for name in ("cos", "sin"):
        shared[name] = constant(t, name, (s, size), FP32, Role.WEIGHTS)
