"""What operations declare alike: storages made and let go, gradients of the inputs that need one,
and whole nodes whose gradients are new tensors."""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import Tape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.ir.costs import Cost


def made(*tensors: Tensor | None) -> Steps:
    """The tensors allocated in order; None is nothing."""
    return tuple((ALLOC, x) for x in tensors if x is not None)


def freed(*tensors: Tensor) -> Steps:
    """The tensors let go in order."""
    return tuple((FREE, x) for x in tensors)


def meanwhile(*tensors: Tensor) -> Steps:
    """Tensors that live while an operation runs, beside what it made before."""
    return (*made(*tensors), *freed(*tensors))


def workspaces(
    t: Tape, axes: tuple[Size, ...], dtype: DType, names: Sequence[str], role: Role = Role.WORKSPACE
) -> tuple[Tensor, ...]:
    """Tensors of one shape and type, which differ in name."""
    return tuple(t.tensor(name, axes, dtype, role) for name in names)


def same_storage(x: Value, *, axes: tuple[Size, ...] | None = None) -> Value:
    """The value that an operation in place, or a view with other axes, gives back."""
    return Value(x.tensor, x.axes if axes is None else axes, x.dtype, x.requires_grad)


def result(
    t: Tape,
    name: str,
    axes: tuple[Size, ...],
    dtype: DType,
    inputs: Sequence[Value],
    role: Role = Role.ACTIVATIONS,
) -> Value:
    """The new output of an operation: it needs a gradient where one of the inputs does."""
    needs = any(x.requires_grad for x in inputs)
    return Value(t.tensor(name, axes, dtype, role), axes, dtype, needs)


def gradients_of(t: Tape, values: Sequence[Value]) -> tuple[Gradient, ...]:
    """A new gradient for each of the values that needs one."""
    return tuple(Gradient(x, t.gradient_of(x)) for x in values if x.requires_grad)


def passed(*values: Value) -> tuple[Gradient, ...]:
    """The incoming gradient itself for each of the values that needs one."""
    return tuple(Gradient(x, None) for x in values if x.requires_grad)


def read_by_gradients(x: Value, y: Value) -> list[Tensor]:
    """What a product keeps: each factor where the other one's gradient asks for it."""
    return [v.tensor for v, other in ((x, y), (y, x)) if other.requires_grad]


def node(
    t: Tape,
    name: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    new: Sequence[Tensor] = (),
    saves: Sequence[Tensor] = (),
    costs: Sequence[Cost] = (),
    differentiated: Sequence[Value] | None = None,
    backward_workspace: Sequence[Tensor] = (),
    backward_costs: Sequence[Cost] = (),
) -> None:
    """Records an operation that makes `new` tensors and, backward, a new gradient for each input.

    `differentiated`: the inputs in the order in which their gradients are made, where it is another
    one. The workspace lives beside the gradients.
    """
    gradients = gradients_of(t, inputs if differentiated is None else differentiated)
    t.append(
        name,
        inputs,
        outputs,
        forward=made(*new),
        saves=saves,
        costs=costs,
        backward=(*made(*(g.tensor for g in gradients)), *meanwhile(*backward_workspace)),
        gradients=gradients,
        backward_costs=backward_costs,
    )


def autograd_function(
    t: Tape,
    name: str,
    inputs: Sequence[Value],
    out: Value,
    *,
    new: Sequence[Tensor],
    passing: Sequence[Tensor],
    saved: Sequence[Tensor],
    saves: Sequence[Tensor],
    again: Sequence[Tensor],
    costs: tuple[Cost, ...],
) -> None:
    """Records kernels that are one autograd function, whose backward does three times the work.

    The forward makes `new` tensors, lets `passing` ones go and keeps `saved` ones; `saves` are what
    the backward reads, inputs included. The backward makes `again` beside the gradients.
    """
    forward = (*made(*new), *freed(*passing))
    if not any(value.requires_grad for value in inputs):
        t.append(name, inputs, (out,), forward=(*forward, *freed(*saved)), costs=costs)
        return
    gradients = gradients_of(t, inputs)
    t.append(
        name,
        inputs,
        (out,),
        forward=forward,
        saves=saves,
        costs=costs,
        backward=(*made(*again), *made(*(g.tensor for g in gradients)), *freed(*again)),
        gradients=gradients,
        backward_costs=costs * 3,
    )
    for tensor in saved:
        t.touch(tensor)
