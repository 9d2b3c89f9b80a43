"""LFM2's gated short convolution: what goes into it and what comes out are multiplied by
projections of the same input.

Source: transformers 5.23 models/lfm2/modeling_lfm2.py Lfm2ShortConv.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, convolution_state
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, h, mi, s
from napkinmath.ir.tape import Tape
from napkinmath.ops.convolution import causal_convolution
from napkinmath.ops.elementwise import copy, mul
from napkinmath.ops.index import chunk
from napkinmath.ops.matmul import linear


class ShortConvolution(Record):
    """out(C * conv(B * x)) with B, C and x from one projection."""

    kernel: int
    bias: bool = False
    scope: str = "conv"

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of its convolution."""
        return (convolution_state(mi, self.kernel),)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """The mixer of x of axes (b, s, h)."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            whole = linear(t, x, "in_proj", 3 * mi, bias=self.bias)
            frame.local(whole)
            before, after, values = (
                Value(part.tensor, (b, mi, s), part.dtype, part.requires_grad)
                for part in chunk(t, whole, (mi, mi, mi))
            )
            t.ops[-1].outputs = (
                (before, after, values) if whole.requires_grad else t.ops[-1].outputs
            )
            gated = mul(t, before, values)
            convolved = causal_convolution(
                t, gated, "conv", mi, self.kernel, bias=self.bias, activated=False
            )
            y = mul(t, after, convolved)
            frame.local(convolved)
            y = copy(t, y, (b, s, mi))
            frame.local(y)
            return linear(t, y, "out_proj", h, bias=self.bias)
