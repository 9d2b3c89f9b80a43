"""Modules whose weights lie in memory while a batch of text runs: a tower for which there are no
rules."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import Tape
from napkinmath.ops.index import constant
from napkinmath.ops.matmul import linear


class IdleLinear(Record):
    """A linear that does not run; adapters and quantization reach it as any other."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    kind: str = "linear"


class IdleWeight(Record):
    """A parameter of another kind, or a buffer."""

    name: str
    axes: tuple[int, ...]
    kind: str = "other"
    buffer: bool = False
    wide: bool = False
    """It stays in fp32."""


def idle_layer_norm(name: str, width: int) -> tuple[IdleWeight, IdleWeight]:
    """Weight and bias of a LayerNorm."""
    return (
        IdleWeight(name=f"{name}.weight", axes=(width,), kind="norm"),
        IdleWeight(name=f"{name}.bias", axes=(width,), kind="norm"),
    )


class IdleModule(Part):
    """Weights alone; the stage that holds it never runs."""

    linears: tuple[IdleLinear, ...] = ()
    weights: tuple[IdleWeight, ...] = ()

    @property
    def is_unread(self) -> bool:
        return True

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        for one in self.linears:
            rows = constant(t, "no input", (1, one.inputs), t.policy.compute_dtype)
            linear(t, rows, one.name, one.outputs, bias=one.bias, kind=one.kind)
        for weight in self.weights:
            dtype = FP32 if weight.wide else None
            t.weight(weight.name, weight.axes, kind=weight.kind, buffer=weight.buffer, dtype=dtype)
        return None
