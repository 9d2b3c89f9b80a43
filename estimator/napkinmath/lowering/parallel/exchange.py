"""An exchange between ranks as one operation: what comes in is a new tensor, and so is the gradient
that comes back."""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.tape import Tape


def exchange(
    t: Tape,
    name: str,
    x: Value,
    out: Tensor,
    *,
    making: Callable[[Tensor, Value], Steps],
    costs: Sequence[Cost],
    backward_costs: Sequence[Cost],
) -> Value:
    """Records x becoming `out` by an exchange, and its gradient by the opposite one.

    `making` gives the events that make a tensor which is exchanged for a value: the output for x,
    the gradient of x for the output.
    """
    value = Value(out, out.axes, x.dtype, x.requires_grad)
    made = None
    if x.requires_grad:
        made = t.gradient_of(x)
        if out.role is Role.LOGITS:
            made.role = Role.LOGITS
    t.append(
        name,
        (x,),
        (value,),
        forward=making(out, x),
        costs=costs,
        backward=making(made, value) if made is not None else (),
        gradients=(Gradient(x, made),) if made is not None else (),
        backward_costs=backward_costs,
    )
    return value


def through(buffers: Sequence[Tensor], made: Tensor) -> Steps:
    """The events that make a tensor out of buffers that go when it is there."""
    return (
        *((ALLOC, buffer) for buffer in buffers),
        (ALLOC, made),
        *((FREE, buffer) for buffer in buffers),
    )
