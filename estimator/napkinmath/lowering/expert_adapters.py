"""LoRA on a parameter itself: how PEFT adapts experts and routers that transformers 5 no longer
keeps as linears.

The adapted weight W + scaling · B·A exists in full, in W's type, while it is used and, kept for the
backward, until then; its gradient is as large. Source: peft 0.21 tuners/lora/layer.py ParamWrapper,
utils/transformers_weight_conversion.py.
"""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.tape import Scope, Tape
from napkinmath.lowering.adapters import lora_weight
from napkinmath.ops.elementwise import add, cast, scale


def adapted_experts(
    t: Tape, frame: Scope, weight: Weight, *, fused: int, transposed: bool
) -> tuple[Value, Value]:
    """Low-rank factors of an expert stack (e, out, in) in the stack's type; `fused` projections
    share the stack, each with its rank.

    Registering the parametrization computes the adapted weight once for nothing.
    """
    assert t.policy.adapter is not None
    experts, first, second = weight.axes
    outputs, inputs = (second, first) if transposed else (first, second)
    rank = t.policy.adapter.rank * fused
    a = lora_weight(t, f"{weight.tensor.name}.lora_A", (experts * rank, inputs))
    b = lora_weight(t, f"{weight.tensor.name}.lora_B", (outputs, experts * rank))
    right = cast(t, t.view(b, (experts, outputs, rank), copies_gradient=True), weight.tensor.dtype)
    left = cast(t, t.view(a, (experts, rank, inputs)), weight.tensor.dtype)
    frame.local(left, right)
    unused = t.tensor(
        "adapted weight at registration", weight.axes, weight.tensor.dtype, Role.WORKSPACE
    )
    t.append(
        "baddbmm",
        (weight.value, right, left),
        (),
        forward=((ALLOC, unused), (FREE, unused)),
        costs=_costs(weight, rank),
    )
    return right, left


def fold(t: Tape, weight: Weight, right: Value, left: Value) -> Value:
    """`baddbmm`: the adapted weight as a new tensor; keeps both factors."""
    dtype, costs = weight.tensor.dtype, _costs(weight, right.axes[-1])
    out = Value(t.tensor("adapted weight", weight.axes, dtype), weight.axes, dtype, True)
    backward: list[tuple[str, Tensor]] = []
    gradients: list[Gradient] = []
    for factor in (right, left):
        product = t.tensor("product", factor.axes, factor.dtype, Role.WORKSPACE)
        scaled = t.gradient_of(factor)
        backward += [(ALLOC, product), (ALLOC, scaled), (FREE, product)]
        gradients.append(Gradient(factor, scaled))
    t.append(
        "baddbmm",
        (weight.value, right, left),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=(right.tensor, left.tensor),
        costs=costs,
        backward=tuple(backward),
        gradients=gradients,
        backward_costs=costs * 2,
    )
    return out


def _costs(weight: Weight, rank: Size) -> tuple[Gemm | Move, ...]:
    experts, outputs, inputs = weight.axes
    return Gemm(outputs, inputs, rank, weight.tensor.dtype, experts), Move(weight.tensor.nbytes)


def adapted_matrix(t: Tape, weight: Weight) -> Value:
    """A 2-D parameter (a router) plus scaling · B·A, made in the adapter's type, then cast and
    added; added once more at registration."""
    assert t.policy.adapter is not None
    outputs, inputs = weight.axes
    rank = t.policy.adapter.rank
    a, b = (
        lora_weight(t, "lora_A.weight", (rank, inputs)),
        lora_weight(t, "lora_B.weight", (outputs, rank)),
    )
    product = t.op(
        "B A",
        (b, a),
        weight.axes,
        a.dtype,
        saves=(a, b),
        gradients=("like", "like"),
        costs=(Gemm(outputs, inputs, rank, a.dtype),),
        backward_costs=(Gemm(outputs, rank, inputs, a.dtype), Gemm(rank, inputs, outputs, a.dtype)),
    )
    delta = cast(t, scale(t, product), weight.tensor.dtype)
    unused = t.tensor(
        "adapted weight at registration", weight.axes, weight.tensor.dtype, Role.WORKSPACE
    )
    t.append(
        "add",
        (weight.value, delta),
        (),
        forward=((ALLOC, unused), (FREE, unused)),
        costs=(Move(3 * traffic(delta)),),
    )
    return add(t, weight.value, delta)
