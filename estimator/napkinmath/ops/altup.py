"""Operations of Gemma 3n's text: statistics of rows, copies stacked before the batch, an addition
in place to some of them."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Gradient, Value
from napkinmath.ir.tape import LIKE, REDUCE, Tape
from napkinmath.ops.elementwise import OUTPUT, promote, unary
from napkinmath.ops.nodes import freed, made, same_storage, workspaces


def sqrt(t: Tape, x: Value) -> Value:
    """The square root; keeps its output."""
    return unary(t, "sqrt", x, saves=OUTPUT)


def bounded(t: Tape, x: Value, *masks: str) -> Value:
    """`x.clamp` by numbers: keeps x; the backward makes a mask for each bound, and the gradient."""
    return t.op(
        "clamp",
        (x,),
        x.axes,
        x.dtype,
        saves=(x,),
        gradients=(LIKE,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(3 * traffic(x), 2),),
        backward_temporaries=workspaces(t, x.axes, BOOL, masks),
    )


def standard_deviation(t: Tape, x: Value) -> Value:
    """The standard deviation of the last axis; keeps x and its output (FunctionsManual.cpp
    std_backward)."""
    rows = (*x.axes[:-1], 1)
    small = workspaces(t, rows, x.dtype, ("2 deviations", "share", "is zero", "mean", "factor"))
    centred = workspaces(t, x.axes, x.dtype, ("x - mean",))
    out = t.op(
        "std",
        (x,),
        rows,
        x.dtype,
        saves=(x,),
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        backward_costs=(Move(5 * traffic(x), 3),),
        backward_temporaries=(*small, *centred),
    )
    if out.requires_grad:
        t.ops[-1].saves = (x.tensor, out.tensor)
    return out


def divide_rows(t: Tape, x: Value, rows: Value) -> Value:
    """x divided by one number a row; the divisor's gradient is a product in full, summed
    (FunctionsManual.cpp div_tensor_other_grad)."""
    dtype = promote(x.dtype, rows.dtype)
    steps = ("x / rows", "x / rows ** 2", "-gradient") if rows.requires_grad else ()
    return t.op(
        "div rows",
        (x, rows),
        x.axes,
        dtype,
        saves=(rows, x if rows.requires_grad else None),
        gradients=(LIKE if x.dtype is dtype else REDUCE, REDUCE),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(10 * traffic(x), 5),),
        backward_temporaries=workspaces(t, x.axes, dtype, steps),
    )


def repeat_copies(t: Tape, x: Value, copies: Size) -> Value:
    """`x.repeat(copies, 1, ...)`: a tensor of so many copies; the gradient is their sum."""
    return t.op(
        "repeat",
        (x,),
        (copies, *x.axes),
        x.dtype,
        gradients=(LIKE,),
        costs=(Move((copies + 1) * traffic(x)),),
        backward_costs=(Move((copies + 1) * traffic(x)),),
    )


def mean_of_copies(t: Tape, x: Value) -> Value:
    """The mean over the first axis; the gradient is expanded in full."""
    out_axes = x.axes[1:]
    return t.op(
        "mean",
        (x,),
        out_axes,
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        backward_costs=(Move(traffic(x)),),
    )


def choose(t: Tape, mask: Value, x: Value, y: Value) -> Value:
    """`torch.where` of two tensors of one shape: keeps the mask."""
    return t.op(
        "where",
        (x, y),
        x.axes,
        x.dtype,
        saves=(mask,),
        gradients=(LIKE, LIKE),
        costs=(Move(3 * traffic(x)),),
        backward_costs=(Move(4 * traffic(x), 2),),
    )


def add_to_view(t: Tape, x: Value, y: Value) -> Value:
    """`x += y` where x is a permuted view: its gradient is written into zeros as large as the
    storage, then copied whole and once more for y (CopySlices, as_strided_backward)."""
    out = same_storage(x)
    out.requires_grad = x.requires_grad or y.requires_grad
    cost = Move(3 * traffic(x))
    if not out.requires_grad:
        t.append("add_", (x, y), (out,), forward=(), costs=(cost,))
        return out
    (zeros,) = workspaces(t, x.axes, x.dtype, ("zeros of the storage",))
    whole, slice_ = t.gradient_of(x), t.gradient_of(y)
    given = [Gradient(v, g) for v, g in ((x, whole), (y, slice_)) if v.requires_grad]
    t.append(
        "add_ to view",
        (x, y),
        (out,),
        forward=(),
        costs=(cost,),
        backward=(
            *made(zeros, whole),
            *freed(zeros),
            *made(slice_),
            *freed(*(g for v, g in ((x, whole), (y, slice_)) if not v.requires_grad)),
        ),
        gradients=given,
        backward_costs=(Move(8 * traffic(x), 5),),
    )
    return out


def add_to_rest(t: Tape, x: Value, y: Value) -> Value:
    """`x[1:] += y`: in place and, as Python writes the slice back, a copy onto itself.

    The backward of either goes through CopySlices, which copies the whole gradient and the slice
    (torch/csrc/autograd/functions/tensor.cpp CopySlices::apply); the slice is read once more.
    """
    out = same_storage(x)
    cost = Move(4 * traffic(x))
    out.requires_grad = x.requires_grad or y.requires_grad
    if not out.requires_grad:
        t.append("add to slice", (x, y), (out,), forward=(), costs=(cost,))
        return out
    copies, *rest = x.axes
    part = (copies - 1, *rest)
    (whole, of_slice) = workspaces(t, x.axes, x.dtype, ("whole gradient", "gradient of the slice"))
    handed, zeros, again = workspaces(t, part, x.dtype, ("slice", "zeros", "slice again"))
    gradients = [Gradient(v, t.gradient_of(v)) for v in (x, y) if v.requires_grad]
    t.append(
        "add to slice",
        (x, y),
        (out,),
        forward=(),
        costs=(cost,),
        backward=(
            *made(whole, handed, zeros),
            *freed(zeros),
            *made(of_slice),
            *freed(handed),
            *freed(of_slice),
            *made(*(g.tensor for g in gradients if g.of is x), again),
            *freed(whole),
            *made(*(g.tensor for g in gradients if g.of is y)),
            *freed(again),
        ),
        gradients=gradients,
        backward_costs=(Move(12 * traffic(x), 8),),
    )
    return out
