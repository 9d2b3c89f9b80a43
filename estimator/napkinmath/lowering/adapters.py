"""Adapters around a linear, op by op as PEFT runs them.

Source: peft 0.21 tuners/lora/layer.py Linear.forward (dense base) and tuners/lora/bnb.py Linear4bit.forward.
"""

from __future__ import annotations

from napkinmath.expr import Size
from napkinmath.ledger import Role, Value
from napkinmath.ops.elementwise import add, cast, copy, dropout, scale
from napkinmath.ops.matmul import dense_linear
from napkinmath.train_config import AdapterConfig, AdapterKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.tape import Tape


def adapted_linear(t: Tape, x: Value, outputs: Size, base: Callable[[Value], Value], config: AdapterConfig, *, role: Role) -> Value:
    """The linear with its adapter: base output plus scaling · B(A(dropout(x)))."""
    if config.kind is AdapterKind.IA3:
        from napkinmath.lowering.ia3 import ia3_linear

        return ia3_linear(t, x, outputs, base)
    with t.scope() as frame:
        frame.local(x)
        result = base(x)
        quantized = t.policy.format is not None
        if quantized:  # result = result.clone(): backprop through views of 4-bit outputs needs it
            result = copy(t, result, name="clone")
        dtype = result.dtype
        source = x
        with t.scope("lora"):
            a = lora_weight(t, "lora_A.weight", (config.rank, x.axes[-1]))
            b = lora_weight(t, "lora_B.weight", (outputs, config.rank))
        if not quantized or t.policy.autocast is None:
            source = cast(t, source, a.dtype)  # _cast_input_dtype, bound to the name of the input
            frame.release(x)
            frame.local(source)
        source = dropout(t, source, config.dropout)
        low = dense_linear(t, source, a, None, label="A x")
        update = scale(t, dense_linear(t, low, b, None, label="B A x", role=role))
        if quantized and t.policy.autocast is None:
            update = cast(t, update, dtype)
        return cast(t, add(t, result, update), dtype)


def lora_weight(t: Tape, name: str, axes: tuple[Size, ...]) -> Value:
    """A trained adapter matrix in the adapter's type."""
    from napkinmath.ledger import Tensor, Weight

    dtype = t.policy.adapter_dtype
    weight = Weight(f"{t.module}.{name}", axes, Tensor(name, axes, dtype, Role.ADAPTERS, t.module), trainable=True, kind="adapter")
    t.weights.append(weight)
    return weight.value
