"""Feed-forward layers."""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import f
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.activations import ACTIVATIONS as ACTIVATIONS
from napkinmath.models.layers.activations import activate
from napkinmath.ops.elementwise import dropout, mul
from napkinmath.ops.index import chunk
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def _in_tiles(t: Tape, x: Value, fed: Callable[[Tape, Value], Value]) -> Value:
    """fed(x), over tiles of its tokens where the configuration asks for them."""
    if not t.policy.config.mlp_tiles:
        return fed(t, x)
    from napkinmath.lowering.token_tiles import in_tiles

    return in_tiles(t, x, fed)


class GatedMlp(Record):
    """down(act(gate(x)) * up(x))."""

    activation: str = "silu"
    bias: bool = False
    width: Size = f
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    scope: str = "mlp"
    kind: str = "linear"
    """"linear without adapter" where PEFT's all-linear leaves the projections out."""
    dropout: float = 0.0

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            return _in_tiles(t, x, self._fed)

    def _fed(self, t: Tape, x: Value) -> Value:
        if t.policy.patches("mlp") or t.policy.patches("gate"):
            return dropout(t, self._patched(t, x), self.dropout)
        if t.policy.stack.model.halves_gate and not t.compiles:
            halves = FusedGatedMlp(activation=self.activation, bias=self.bias, width=self.width)
            return dropout(t, halves.fed(t, x), self.dropout)
        gate = linear(t, x, self.names[0], self.width, bias=self.bias, kind=self.kind)
        if t.compiles or t.policy.stack.model.fused_gate:
            from napkinmath.ops.fused import gated_activation

            product = gated_activation(
                t, gate, linear(t, x, self.names[1], self.width, bias=self.bias, kind=self.kind)
            )
        else:
            gate = activate(t, gate, self.activation)
            product = mul(
                t, gate, linear(t, x, self.names[1], self.width, bias=self.bias, kind=self.kind)
            )
        return dropout(
            t,
            linear(t, product, self.names[2], x.axes[-1], bias=self.bias, kind=self.kind),
            self.dropout,
        )

    def _patched(self, t: Tape, x: Value) -> Value:
        """One operation where the projections can be fused, else the patched gate between them, or
        the library's."""
        from napkinmath.lowering.patched_feed_forward import fused_feed_forward
        from napkinmath.models.layers.patched import patched_gate

        whole = (
            fused_feed_forward(t, x, self.names, self.width, bias=self.bias, kind=self.kind)
            if t.policy.patches("mlp")
            else None
        )
        if whole is not None:
            return whole
        gate = linear(t, x, self.names[0], self.width, bias=self.bias, kind=self.kind)
        if t.policy.patches("gate"):
            product = patched_gate(
                t, gate, linear(t, x, self.names[1], self.width, bias=self.bias, kind=self.kind)
            )
        else:
            gate = activate(t, gate, self.activation)
            product = mul(
                t, gate, linear(t, x, self.names[1], self.width, bias=self.bias, kind=self.kind)
            )
        return linear(t, product, self.names[2], x.axes[-1], bias=self.bias, kind=self.kind)


class FusedGatedMlp(Record):
    """down(up * act(gate)) with gate and up projected by one linear."""

    activation: str = "silu"
    bias: bool = False
    width: Size = f
    names: tuple[str, str] = ("gate_up_proj", "down_proj")
    scope: str = "mlp"

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            return _in_tiles(t, x, self.fed)

    def fed(self, t: Tape, x: Value) -> Value:
        """The same within a scope that is there."""
        with t.scope() as frame:
            both = linear(t, x, self.names[0], 2 * self.width, bias=self.bias)
            gate, up = chunk(t, both, (self.width, self.width))
            frame.local(gate)
            if t.policy.patches("gate"):
                from napkinmath.models.layers.patched import patched_gate

                product = patched_gate(t, gate, up, joint=True)
            elif t.compiles:
                from napkinmath.ops.fused import gated_activation

                product = gated_activation(t, gate, up)
            else:
                product = mul(t, up, activate(t, gate, self.activation))
            return linear(t, product, self.names[1], x.axes[-1], bias=self.bias)


class PlainMlp(Record):
    """out(act(in(x))), with dropout at the end where the family has it."""

    activation: str = "gelu"
    bias: bool = True
    width: Size = f
    names: tuple[str, str] = ("fc1", "fc2")
    scope: str = "mlp"
    dropout: float = 0.0
    inner_dropout: float = 0.0
    """Dropout between activation and second linear."""
    kind: str = "linear"
    inlined: bool = False
    """Written out in the layer's own forward, which gives the input's name to each result in turn
    (OPT)."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x."""
        with t.scope(self.scope) as frame:
            if not self.inlined:
                frame.local(x)
            return _in_tiles(t, x, self._fed)

    def _fed(self, t: Tape, x: Value) -> Value:
        middle = activate(
            t,
            linear(t, x, self.names[0], self.width, bias=self.bias, kind=self.kind),
            self.activation,
        )
        middle = dropout(t, middle, self.inner_dropout)
        return dropout(
            t,
            linear(t, middle, self.names[1], x.axes[-1], bias=self.bias, kind=self.kind),
            self.dropout,
        )
