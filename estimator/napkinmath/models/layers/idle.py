"""Modules whose weights lie in memory while a batch of text runs: a tower for which there are no
rules."""

from __future__ import annotations

from math import prod

from napkinmath.base.dtypes import find_dtype
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
    dtype: str = ""
    """The type that it has whatever the model's is."""


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

    @property
    def elements(self) -> int:
        """Elements of all its weights and buffers."""
        linears = sum(one.outputs * (one.inputs + one.bias) for one in self.linears)
        return linears + sum(prod(one.axes) for one in self.weights)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        for one in self.linears:
            rows = constant(t, "no input", (1, one.inputs), t.policy.compute_dtype)
            linear(t, rows, one.name, one.outputs, bias=one.bias, kind=one.kind)
        for weight in self.weights:
            dtype = find_dtype(weight.dtype) if weight.dtype else None
            t.weight(weight.name, weight.axes, kind=weight.kind, buffer=weight.buffer, dtype=dtype)
        return None


class UnusedModule(IdleModule):
    """A module of a tower that runs for nothing: what it makes is dropped with the call, and gives
    its weights no gradient."""

    @property
    def is_unread(self) -> bool:
        return False


def pooling_head(width: int, inner: int) -> UnusedModule:
    """The weights of SigLIP's pooling (SiglipMultiheadAttentionPoolingHead), which language models
    do not read. Its attention is torch's, whose last linear is a subclass: bitsandbytes leaves it
    whole, as it packs none (transformers 5.23 integrations/bitsandbytes.py)."""
    return UnusedModule(
        linears=(
            IdleLinear(
                name="attention.out_proj",
                inputs=width,
                outputs=width,
                bias=True,
                kind="unquantized linear",
            ),
            IdleLinear(name="mlp.fc1", inputs=width, outputs=inner, bias=True),
            IdleLinear(name="mlp.fc2", inputs=inner, outputs=width, bias=True),
        ),
        weights=(
            IdleWeight(name="probe", axes=(1, 1, width)),
            IdleWeight(name="attention.in_proj_weight", axes=(3 * width, width)),
            IdleWeight(name="attention.in_proj_bias", axes=(3 * width,), kind="bias"),
            *idle_layer_norm("layernorm", width),
        ),
    )
