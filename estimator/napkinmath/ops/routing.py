"""Routing of tokens to experts: top-k, gathers and scatters of rows, and the grouped matrix
product.

Sources: torch tools/autograd/derivatives.yaml (topk, index, gather, _grouped_mm) with
FunctionsManual.cpp's in-place forms, aten/src/ATen/native/cuda/Indexing.cu
index_put_with_sort_kernel.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT32, INT64
from napkinmath.base.expr import Size, ceil_div
from napkinmath.ir.costs import Dispatch, Gemm, Move, Repeated, traffic
from napkinmath.ir.ledger import Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.ops.elementwise import cast, promote
from napkinmath.ops.index import constant
from napkinmath.ops.matmul import gradient_bits, mark_summed
from napkinmath.ops.nodes import (
    freed,
    gradients_of,
    made,
    meanwhile,
    node,
    read_by_gradients,
    result,
    same_storage,
    workspaces,
)


def top_k(t: Tape, x: Value, count: Size) -> tuple[Value, Value]:
    """The `count` largest of each row, and where they are; the gradient is scattered into zeros
    like x."""
    axes = (*x.axes[:-1], count)
    values = result(t, "top-k values", axes, x.dtype, (x,))
    indices = result(t, "top-k indices", axes, INT64, ())
    node(
        t,
        "topk",
        (x,),
        (values, indices),
        new=(values.tensor, indices.tensor),
        saves=(indices.tensor,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(traffic(x) + traffic(values, indices), 2),),
    )
    return values, indices


def gather(t: Tape, x: Value, indices: Value) -> Value:
    """One element of x for each index along the last axis; keeps x (for its shape) and the indices,
    the gradient is scattered into zeros like x."""
    moved = traffic(indices) + 2 * traffic(Value(x.tensor, indices.axes, x.dtype))
    return t.op(
        "gather",
        (x, indices),
        indices.axes,
        x.dtype,
        saves=(x, indices),
        gradients=(LIKE, None),
        costs=(Move(moved),),
        backward_costs=(Move(moved + traffic(x), 2),),
    )


def take_rows(t: Tape, x: Value, indices: Value, name: str = "rows") -> Value:
    """`x[indices]` along the first axis: a copy; keeps the indices.

    Backward adds rows into zeros like x; CUDA sorts the indices for that, which holds three int64
    copies of them.
    """
    sorting = ("linear index", "sorted index", "positions") if x.requires_grad else ()
    out = result(t, name, (indices.axes[0], *x.axes[1:]), x.dtype, (x,))
    moved = 2 * traffic(out)
    node(
        t,
        "index",
        (x, indices),
        (out,),
        new=(out.tensor,),
        saves=(indices.tensor,),
        costs=(Move(moved),),
        backward_workspace=workspaces(t, indices.axes, INT64, sorting),
        backward_costs=(Move(moved + traffic(x), 5),),
    )
    return out


def sort_by_expert(t: Tape, experts: Value) -> tuple[Value, Value]:
    """`torch.sort` of the flat expert numbers: sorted numbers and the permutation, with its double
    buffers while it runs."""
    buffers = workspaces(t, experts.axes, INT64, ("sort keys", "sort values"))
    numbers = result(t, "sorted experts", experts.axes, INT64, ())
    order = result(t, "permutation", experts.axes, INT64, ())
    t.append(
        "sort",
        (experts,),
        (numbers, order),
        forward=(*made(numbers.tensor, order.tensor), *meanwhile(*buffers)),
        costs=(Move(8 * traffic(experts), 4),),
    )
    return numbers, order


def group_offsets(t: Tape, experts: Value, num_experts: Size) -> tuple[Value, Value, Value]:
    """int32 copy of the expert numbers, tokens of each expert, and their running sum, which
    `grouped_mm` reads."""
    narrow = constant(t, "experts as int32", experts.axes, INT32)
    counts = constant(t, "tokens per expert", (num_experts,), INT32)
    return narrow, counts, constant(t, "offsets", (num_experts,), INT32)


def grouped_mm(
    t: Tape,
    x: Value,
    w: Value,
    offsets: Value,
    outputs: Size,
    experts: Size,
    *,
    by_torch: bool = True,
) -> Value:
    """`F.grouped_mm`: rows of x, sorted by expert, times each expert's matrix; keeps what the two
    gradients read, and the offsets. Another library's products have a kernel on every GPU.

    It is not an autocast operation: x is cast to the weight's type. Its cost counts every expert's
    weight once and the rows evenly: the kernel's work does not depend on how even the routing is,
    the weights read do.
    """
    x = cast(t, x, w.dtype)
    rows, inputs = x.axes
    each, dtype = ceil_div(rows, experts), x.dtype
    out = result(t, "expert output", (rows, outputs), dtype, (x, w))
    bits = gradient_bits(t, w)
    kind = {"grouped": by_torch, "of_weight": True}
    of_weight = Gemm(inputs, outputs, each, dtype, experts, bits, routed="weights", **kind)
    of_rows = Gemm(each, inputs, outputs, dtype, experts, grouped=by_torch, routed="rows")
    forward = Gemm(each, outputs, inputs, dtype, experts, grouped=by_torch, routed="rows")
    node(
        t,
        "grouped_mm",
        (x, w, offsets),
        (out,),
        new=(out.tensor,),
        saves=(*read_by_gradients(x, w), offsets.tensor),
        costs=(forward,),
        differentiated=(w, x),
        backward_costs=[of_weight] * w.requires_grad + [of_rows] * x.requires_grad,
    )
    mark_summed(t, w)
    return out


def one_by_one(t: Tape, w: Value, experts: int) -> None:
    """Makes the grouped product recorded last a loop over experts, each with its own matrix out of
    the parameter. The gradient of such a slice is the whole parameter's zeros with one matrix in
    them, added to the sum of those before (torch FunctionsManual.cpp select_backward)."""
    op = t.ops[-1]
    op.costs = (*op.costs, Dispatch(experts - 1))
    if not w.requires_grad:
        return
    (zeros,) = workspaces(t, w.axes, w.dtype, ("gradient of one expert's slice",))
    op.backward = (*op.backward, *meanwhile(zeros))
    passes = Move(4 * traffic(w), 4)
    op.backward_costs = (*op.backward_costs, Repeated(passes, experts))


def row_sum(t: Tape, x: Value) -> Value:
    """Sum over the last axis, kept as an axis of one; the gradient is an expanded view. Autocast
    makes it fp32."""
    source = x if t.policy.autocast is None else cast(t, x, FP32)
    return t.op(
        "sum",
        (source,),
        (*x.axes[:-1], 1),
        source.dtype,
        gradients=(PASS,),
        costs=(Move(traffic(source)),),
    )


def divide_rows_(t: Tape, x: Value, rows: Value) -> Value:
    """`x /= rows` in place, one divisor a row: autograd keeps a copy of the old x and the
    divisor."""
    if not x.requires_grad:
        t.append("div_", (x, rows), (x,), forward=(), costs=(Move(2 * traffic(x)),))
        return x
    old, out = t.tensor("x before div_", x.axes, x.dtype), same_storage(x)
    names = ("x / d", "x / d / d", "-g", "product before the sum")
    *work, summed = workspaces(t, x.axes, x.dtype, names)
    to_x, to_rows = t.gradient_of(x), t.gradient_of(rows)
    t.append(
        "div_",
        (x, rows),
        (out,),
        forward=made(old),
        saves=(old, rows.tensor),
        costs=(Move(4 * traffic(x), 2),),
        backward=(*made(*work, summed), *freed(*work), *made(to_x, to_rows), *freed(summed)),
        gradients=(Gradient(x, to_x), Gradient(rows, to_rows)),
        backward_costs=(Move(12 * traffic(x), 6),),
    )
    t.touch(old)
    return out


def weigh_rows(t: Tape, x: Value, weights: Value) -> Value:
    """x times one routing weight a row, in the wider type of the two; both products exist before
    they are cast and summed."""
    dtype = promote(x.dtype, weights.dtype)
    out = result(t, "weighted output", x.axes, dtype, (x, weights))
    gradients = gradients_of(t, (x, weights))
    products, fitting = _products_and_sums(t, gradients, out, weights)
    t.append(
        "mul routing weights",
        (x, weights),
        (out,),
        forward=made(out.tensor),
        saves=read_by_gradients(weights, x),
        costs=(Move(traffic(x, out)),),
        backward=products,
        gradients=gradients,
        backward_costs=(Move(3 * traffic(x, out), 3),),
    )
    if out.requires_grad:
        t.ops[-1].fitting = fitting
    return out


def _products_and_sums(
    t: Tape, gradients: tuple[Gradient, ...], out: Value, weights: Value
) -> tuple[Steps, Steps]:
    """The products as large as the output, the last input's first, and the engine's casts and sums
    to the gradients once all are there."""
    products: list[Tensor | None] = []
    fitting: Steps = ()
    for g in gradients:
        if g.of is not weights and g.of.dtype is out.dtype:
            products.append(g.tensor)
            continue
        product = t.tensor("product", out.axes, out.dtype, Role.WORKSPACE)
        products.append(product)
        fitting = (*fitting, *made(g.tensor), *freed(product))
    return made(*reversed(products)), fitting


def sum_over_choices(t: Tape, x: Value, tokens: Size, choices: Size) -> Value:
    """(tokens · choices, h) summed over a token's choices; the expanded gradient is copied by the
    view's backward. Under autocast the sum is fp32, which CUDA's kernel makes of 16-bit rows without
    a copy of them (aten/src/ATen/native/ReduceOpsUtils.h make_reduction_from_ty)."""
    return t.op(
        "sum over choices",
        (x,),
        (tokens, x.axes[-1]),
        x.dtype if t.policy.autocast is None else FP32,
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        backward_costs=(Move(2 * traffic(x)),),
    )
