"""Queries, keys and values of one projection, laid out for kernels of flash-attn that read rows of
tokens, as nanotron copies them.

Source: nanotron 3c356115 models/llama.py CausalSelfAttention.forward; flash-attn 2.5
layers/rotary.py ApplyRotaryEmb and ApplyRotaryEmbKV_ (in place).
"""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, dh, s
from napkinmath.ir.tape import LIKE, Scope, Tape
from napkinmath.ops.elementwise import copy
from napkinmath.ops.index import chunk, concatenate
from napkinmath.ops.matmul import linear
from napkinmath.ops.rotary import rotary_in_place

PROJECTION = "qkv_proj"


def laid_heads(
    t: Tape, frame: Scope, x: Value, kv: Size, *, bias: bool, rotary: bool, kind: str
) -> tuple[Value, Value, Value]:
    """q, k and v of axes (b, heads, s, dh) of x (b, s, h), turned; `frame` is the attention's
    forward, which names the projection's result to its end.

    Without grouped heads the three are copied as one and queries stay a view of it, so that the
    kernel keeps it whole. Grouped ones are copied one by one; those of keys and values end where
    they are put beside each other.
    """
    widths = (a * dh, kv * dh, kv * dh)
    joint = linear(t, x, PROJECTION, (a + 2 * kv) * dh, bias=bias, kind=kind)
    frame.local(joint)
    if kv is a:
        q, key, value = chunk(t, relaid(t, joint, "heads in rows"), widths, name="unbind")
    else:
        q, key, value = (
            copy(t, part, name="heads in rows") for part in chunk(t, joint, widths, name="split")
        )
    beside = concatenate(t, (key, value), (b, s, 2 * kv * dh), name="keys, then values")
    beside = copy(t, beside, name="keys beside values")
    key, value = chunk(t, beside, (kv * dh, kv * dh), name="split")
    if rotary:
        q, key = rotary_in_place(t, q), rotary_in_place(t, key)
    q, key, value = (
        t.view(part, (b, heads, s, dh))
        for part, heads in zip((q, key, value), (a, kv, kv), strict=True)
    )
    return q, key, value


def relaid(t: Tape, x: Value, name: str) -> Value:
    """x copied into another order of its axes, and its gradient back into the first one."""
    moved = Move(2 * traffic(x))
    return t.op(
        name, (x,), x.axes, x.dtype, gradients=(LIKE,), costs=(moved,), backward_costs=(moved,)
    )


def positions_first(t: Tape, x: Value) -> Value:
    """An attention's output (b, s, a·dh) as the rows of positions that the next linear reads: of one
    sequence they are these already."""
    return relaid(t, x, "positions before sequences") if t.at_least("b", 2) else x
