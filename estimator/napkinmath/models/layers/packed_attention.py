"""Attention whose queries, keys and values come out of one linear, in the ways families take them
apart."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import DECODER_TOKENS
from napkinmath.ir.symbols import a, b, dh, s
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.attention import GroupedQueryAttention, split_heads
from napkinmath.ops.index import chunk, slice_of
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar


class Packing(str, Enum):
    """How the packed projection is taken apart; what differs is the backward: one concatenation, or
    a zero-filled copy for each part."""

    SPLIT = "split of the last axis"
    SLICES = "slices of the last axis"
    HEADS = "split within each head"
    SELECTS = "selection within each head"


class PackedAttention(Record):
    """One linear, taken apart, then as `core` goes on; the linear has the first of the core's
    names."""

    core: GroupedQueryAttention
    packing: Packing = Packing.SPLIT
    cached_before: tuple[int, int] = (0, 0)
    """Version of transformers before which training built a key/value cache of views, checkpointing
    or not: the packed projections live until the forward is over."""
    virtual_tokens: ClassVar[str] = DECODER_TOKENS

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What its attention keeps."""
        return self.core.cached

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        core = self.core
        with t.scope(core.scope) as frame:
            frame.local(x)
            packed = linear(t, x, core.names[0], (a + 2 * core.kv_heads) * dh, bias=core.bias)
            if t.policy.stack.model.is_transformers_before(self.cached_before):
                t.outliving.append(packed.tensor)
            q, key, value = self.parts(t, packed, dense=core.dense_gradients(t, x, shared))
            return core.finish(t, frame, q, key, value, shared)

    def parts(self, t: Tape, packed: Value, *, dense: bool) -> tuple[Value, Value, Value]:
        """q, k, v of axes (b, heads, s, dh); `dense`: their gradients come back with the heads
        outside the rows."""
        core = self.core
        if self.packing is Packing.HEADS:
            viewed = t.view(packed, (b, a, s, 3 * dh), copies_gradient=t.known(a) > 1)
            q, key, value = chunk(t, viewed, (dh, dh, dh))
            return q, key, value
        if self.packing is Packing.SELECTS:
            viewed = t.view(packed, (b, s, a, 3, dh))
            return tuple(self._selected(t, viewed, which) for which in range(3))  # type: ignore[return-value]
        widths: tuple[Size, ...] = (a * dh, core.kv_heads * dh, core.kv_heads * dh)
        if self.packing is Packing.SLICES:
            pieces = tuple(slice_of(t, packed, (b, s, width)) for width in widths)
        else:
            pieces = chunk(t, packed, widths, name="split")
        heads = (a, core.kv_heads, core.kv_heads)
        rotated = (
            core.copies_rotated(t, dense=dense)
            if t.policy.patches("rope")
            else core.rotary or dense
        )
        copied = (rotated, rotated, dense)
        q, key, value = (
            split_heads(t, piece, count, copies=copies)
            for piece, count, copies in zip(pieces, heads, copied, strict=True)
        )
        if core.head_norm is None or core.norm_after_rotation:
            return q, key, value
        q = core.head_norm.record(t, q, core.norm_names[0])
        return q, core.head_norm.record(t, key, core.norm_names[1]), value

    def _selected(self, t: Tape, viewed: Value, which: int) -> Value:
        part = slice_of(t, viewed, (b, s, a, dh))
        norm = self.core.head_norm
        if norm is not None and which < 2:
            part = norm.record(t, part, self.core.norm_names[which])
        return t.view(part, (b, a, s, dh))
