"""Adapters around a linear, op by op as PEFT runs them.

Source: peft 0.21 tuners/lora/layer.py Linear.forward (dense base) and tuners/lora/bnb.py Linear4bit.forward.
"""

from __future__ import annotations

from napkinmath.costs import Gemm, Move, traffic
from napkinmath.expr import Size, product
from napkinmath.ledger import ALLOC, FREE, Gradient, Role, Value
from napkinmath.ops.elementwise import add, cast, copy, dropout, scale
from napkinmath.ops.matmul import dense_linear
from napkinmath.train_config import AdapterConfig, AdapterKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.tape import Tape


def adapted_linear(t: Tape, x: Value, outputs: Size, base: Callable[[Value], Value], config: AdapterConfig, *, role: Role, quantized: bool) -> Value:
    """The linear with its adapter: base output plus scaling · B(A(dropout(x))); `quantized` says which of PEFT's two forwards runs."""
    if config.kind is AdapterKind.IA3:
        from napkinmath.lowering.ia3 import ia3_linear

        return ia3_linear(t, x, outputs, base)
    if t.policy.stack.fused_adapters and quantized:
        return fused_adapted_linear(t, x, outputs, base, config)
    with t.scope() as frame:
        frame.local(x)
        result = base(x)
        if quantized:  # result = result.clone(): backprop through views of 4-bit outputs needs it
            result = copy(t, result, name="clone")
        dtype = result.dtype
        source = x
        with t.scope("lora"):
            a = lora_weight(t, "lora_A.weight", (config.rank, x.axes[-1]))
            b = lora_weight(t, "lora_B.weight", (outputs, config.rank))
        if not quantized or t.policy.autocast is None:
            source = cast(t, source, a.dtype)  # _cast_input_dtype; the caller's arguments hold the original
            frame.local(source)
        source = dropout(t, source, config.dropout)
        low = dense_linear(t, source, a, None, label="A x")
        update = scale(t, dense_linear(t, low, b, None, label="B A x", role=role))
        if quantized and t.policy.autocast is None:
            update = cast(t, update, dtype)
        return cast(t, add(t, result, update), dtype)


def fused_adapted_linear(t: Tape, x: Value, outputs: Size, base: Callable[[Value], Value], config: AdapterConfig) -> Value:
    """Base product and adapter as one autograd node, which keeps x and, with dropout, the dropped copy of x.

    The update is added to the base product in place; backward adds the adapter's share to the gradient of x in place. Source:
    unsloth kernels/fast_lora.py LoRA_QKV and LoRA_W with dropout, as carried by fms-acceleration fused_ops/unsloth_lora/bnb/fast_lora.py.
    """
    result = base(x)
    with t.scope("lora"):
        a = lora_weight(t, "lora_A.weight", (config.rank, x.axes[-1]))
        b = lora_weight(t, "lora_B.weight", (outputs, config.rank))
    rows, dtype = product(x.axes[:-1]), result.dtype
    dropped = t.tensor("dropped input", x.axes, dtype) if config.dropout and t.policy.training else None
    low = t.tensor("A x", (*x.axes[:-1], config.rank), dtype, Role.WORKSPACE)
    update = t.tensor("B A x", (*x.axes[:-1], outputs), dtype, Role.WORKSPACE)
    forward = (*(((ALLOC, dropped),) if dropped else ()), (ALLOC, low), (ALLOC, update), (FREE, update), (FREE, low))
    gradients = tuple(Gradient(w, t.gradient_of(w)) for w in (a, b))
    share = t.tensor("adapter's share of the gradient", x.axes, dtype, Role.WORKSPACE)
    made = tuple(g.tensor for g in gradients if g.tensor is not None)
    out = Value(result.tensor, result.axes, dtype, True)
    gemms = (Gemm(rows, config.rank, x.axes[-1], dtype), Gemm(rows, outputs, config.rank, dtype))
    t.append(
        "adapter in one node", (x, result, a, b), (out,), forward=forward, saves=(x.tensor, *((dropped,) if dropped else ())), costs=(*gemms, Move(3 * traffic(result))),
        backward=(*((ALLOC, m) for m in made), (ALLOC, share), (FREE, share)), gradients=(Gradient(result, None), *gradients), backward_costs=(*gemms, *gemms, Move(3 * traffic(x))),
    )  # fmt: skip
    if dropped is not None:
        t.last_use[dropped] = len(t.ops) - 1
    return out


def lora_weight(t: Tape, name: str, axes: tuple[Size, ...]) -> Value:
    """A trained adapter matrix in the adapter's type."""
    from napkinmath.ledger import Tensor, Weight

    dtype = t.policy.adapter_dtype
    weight = Weight(f"{t.module}.{name}", axes, Tensor(name, axes, dtype, Role.ADAPTERS, t.module), trainable=True, kind="adapter")
    t.weights.append(weight)
    return weight.value
