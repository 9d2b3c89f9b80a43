"""Products of two floating tensors of different type or shape, with the full-size gradients that
autograd makes on the way."""

from __future__ import annotations

from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ops.elementwise import promote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.tape import Tape


def mul_mixed(t: Tape, x: Value, y: Value) -> Value:
    """x * y in the wider type; keeps each factor that the other's gradient needs.

    Backward makes both products in the result's shape and type, y's first; the engine then sums a
    broadcast one and casts a narrower one. Source: torch tools/autograd/derivatives.yaml
    mul.Tensor, torch/csrc/autograd/engine.cpp validate_outputs.
    """
    dtype = promote(x.dtype, y.dtype)
    axes = x.axes if len(x.axes) >= len(y.axes) else y.axes
    out = Value(t.tensor("product", axes, dtype), axes, dtype, x.requires_grad or y.requires_grad)
    needing = [v for v in (x, y) if v.requires_grad]
    gradients = [Gradient(v, t.gradient_of(v)) for v in needing]
    saves = [kept.tensor for kept, other in ((y, x), (x, y)) if other.requires_grad]
    moved = traffic(x, y, out)
    t.append(
        "mul",
        (x, y),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=saves,
        costs=(Move(moved),),
        backward=_backward(t, out, gradients),
        gradients=gradients,
        backward_costs=(Move(2 * moved, 2 * len(gradients)),),
    )
    return out


def _backward(t: Tape, out: Value, gradients: list[Gradient]) -> tuple[tuple[str, Tensor], ...]:
    """Full products, last factor first, then their sums and casts, first factor first."""
    steps: list[tuple[str, Tensor]] = []
    later: list[tuple[str, Tensor]] = []
    for gradient in reversed(gradients):
        assert gradient.tensor is not None
        of, made = gradient.of, gradient.tensor
        if of.axes == out.axes and of.dtype is out.dtype:
            steps.append((ALLOC, made))
            continue
        full = t.tensor("product before the sum", out.axes, out.dtype, Role.WORKSPACE)
        steps.append((ALLOC, full))
        if of.axes != out.axes and of.dtype is not out.dtype:
            summed = t.tensor("sum before the cast", of.axes, out.dtype, Role.WORKSPACE)
            later = [(ALLOC, summed), (FREE, full), (ALLOC, made), (FREE, summed), *later]
        else:
            later = [(ALLOC, made), (FREE, full), *later]
    return (*steps, *later)
