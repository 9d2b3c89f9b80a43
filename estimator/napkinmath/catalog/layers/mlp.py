"""Feed-forward layers."""

from __future__ import annotations

from napkinmath.catalog.layers.symbols import f
from napkinmath.expr import Size
from napkinmath.ledger import Value
from napkinmath.ops import elementwise
from napkinmath.ops.elementwise import mul
from napkinmath.ops.matmul import linear
from napkinmath.record import Record
from napkinmath.tape import Tape


def activate(t: Tape, x: Value, name: str) -> Value:
    """The activation function of a config's `hidden_act`."""
    return ACTIVATIONS[name](t, x)


ACTIVATIONS = {
    "silu": elementwise.silu, "swish": elementwise.silu, "gelu": elementwise.gelu, "gelu_pytorch_tanh": elementwise.gelu, "relu": elementwise.relu,
}  # fmt: skip


class GatedMlp(Record):
    """down(act(gate(x)) * up(x))."""

    activation: str = "silu"
    bias: bool = False
    width: Size = f
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    scope: str = "mlp"
    kind: str = "linear"
    """"linear without adapter" where PEFT's all-linear leaves the projections out."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            gate = activate(t, linear(t, x, self.names[0], self.width, bias=self.bias, kind=self.kind), self.activation)
            product = mul(t, gate, linear(t, x, self.names[1], self.width, bias=self.bias, kind=self.kind))
            return linear(t, product, self.names[2], x.axes[-1], bias=self.bias, kind=self.kind)
