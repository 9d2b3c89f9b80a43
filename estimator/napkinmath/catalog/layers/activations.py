"""Activation functions by the names that configs give them, as transformers 5.23 activations.py runs them."""

from __future__ import annotations

from napkinmath.ledger import Value
from napkinmath.ops import elementwise
from napkinmath.ops.elementwise import add, cube, mul, scale, shift, tanh
from napkinmath.tape import Tape


def activate(t: Tape, x: Value, name: str) -> Value:
    """The activation function of a config's `hidden_act`."""
    return ACTIVATIONS[name](t, x)


def gelu_new(t: Tape, x: Value) -> Value:
    """0.5 x (1 + tanh(c (x + 0.044715 x³))), eight operations (NewGELUActivation)."""
    with t.scope():
        half = scale(t, x)
        inner = add(t, x, scale(t, cube(t, x)))
        return mul(t, half, shift(t, tanh(t, scale(t, inner))))


def gelu_fast(t: Tape, x: Value) -> Value:
    """0.5 x (1 + tanh(c x (1 + 0.044715 x x))) (FastGELUActivation)."""
    with t.scope():
        half, scaled = scale(t, x), scale(t, x)
        inner = mul(t, scaled, shift(t, mul(t, scale(t, x), x)))
        return mul(t, half, shift(t, tanh(t, inner)))


def relu2(t: Tape, x: Value) -> Value:
    """relu(x)² (ReLUSquaredActivation)."""
    with t.scope() as frame:
        positive = elementwise.relu(t, x)
        frame.local(positive)
        return elementwise.square(t, positive)


ACTIVATIONS = {
    "silu": elementwise.silu, "swish": elementwise.silu, "gelu": elementwise.gelu, "gelu_pytorch_tanh": elementwise.gelu, "gelu_python_tanh": gelu_new,
    "gelu_new": gelu_new, "gelu_fast": gelu_fast, "relu": elementwise.relu, "relu2": relu2,
}  # fmt: skip
