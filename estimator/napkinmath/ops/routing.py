"""Routing of tokens to experts: top-k, gathers and scatters of rows, and the grouped matrix
product.

Sources: torch tools/autograd/derivatives.yaml (topk, index, gather, _grouped_mm) with
FunctionsManual.cpp's in-place forms, aten/src/ATen/native/cuda/Indexing.cu
index_put_with_sort_kernel.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT32, INT64
from napkinmath.base.expr import Size, ceil_div
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.ops.elementwise import cast, promote
from napkinmath.ops.index import constant


def top_k(t: Tape, x: Value, count: Size) -> tuple[Value, Value]:
    """The `count` largest of each row, and where they are; the gradient is scattered into zeros
    like x."""
    axes = (*x.axes[:-1], count)
    values, indices = (
        t.tensor("top-k values", axes, x.dtype),
        t.tensor("top-k indices", axes, INT64),
    )
    outputs = Value(values, axes, x.dtype, x.requires_grad), Value(indices, axes, INT64)
    gradient = t.gradient_of(x) if x.requires_grad else None
    t.append(
        "topk",
        (x,),
        outputs,
        forward=((ALLOC, values), (ALLOC, indices)),
        saves=(indices,) if gradient else (),
        costs=(Move(2 * traffic(x)),),
        backward=((ALLOC, gradient),) if gradient else (),
        gradients=(Gradient(x, gradient),) if gradient else (),
        backward_costs=(Move(traffic(x) + traffic(*outputs), 2),),
    )
    return outputs


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
    axes = (indices.axes[0], *x.axes[1:])
    sorting = (
        [
            t.tensor(n, indices.axes, INT64, Role.WORKSPACE)
            for n in ("linear index", "sorted index", "positions")
        ]
        if x.requires_grad
        else []
    )
    out = Value(t.tensor(name, axes, x.dtype), axes, x.dtype, x.requires_grad)
    gradient = t.gradient_of(x) if x.requires_grad else None
    backward = (
        ((ALLOC, gradient), *((ALLOC, w) for w in sorting), *((FREE, w) for w in sorting))
        if gradient
        else ()
    )
    moved = 2 * traffic(out)
    t.append(
        "index",
        (x, indices),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=(indices.tensor,) if gradient else (),
        costs=(Move(moved),),
        backward=backward,
        gradients=(Gradient(x, gradient),) if gradient else (),
        backward_costs=(Move(moved + traffic(x), 5),),
    )
    return out


def sort_by_expert(t: Tape, experts: Value) -> tuple[Value, Value]:
    """`torch.sort` of the flat expert numbers: sorted numbers and the permutation, with its double
    buffers while it runs."""
    buffers = [
        t.tensor(n, experts.axes, INT64, Role.WORKSPACE) for n in ("sort keys", "sort values")
    ]
    made = [t.tensor(n, experts.axes, INT64) for n in ("sorted experts", "permutation")]
    outputs = Value(made[0], experts.axes, INT64), Value(made[1], experts.axes, INT64)
    t.append(
        "sort",
        (experts,),
        outputs,
        forward=(
            *((ALLOC, m) for m in made),
            *((ALLOC, w) for w in buffers),
            *((FREE, w) for w in buffers),
        ),
        costs=(Move(8 * traffic(experts), 4),),
    )
    return outputs


def group_offsets(t: Tape, experts: Value, num_experts: Size) -> tuple[Value, Value, Value]:
    """int32 copy of the expert numbers, tokens of each expert, and their running sum, which
    `grouped_mm` reads."""
    narrow = constant(t, "experts as int32", experts.axes, INT32)
    counts = constant(t, "tokens per expert", (num_experts,), INT32)
    return narrow, counts, constant(t, "offsets", (num_experts,), INT32)


def grouped_mm(t: Tape, x: Value, w: Value, offsets: Value, outputs: Size, experts: Size) -> Value:
    """`F.grouped_mm`: rows of x, sorted by expert, times each expert's matrix; keeps what the two
    gradients read, and the offsets.

    It is not an autocast operation: x is cast to the weight's type. Its cost counts every expert's
    weight once and the rows evenly: the kernel's work does not depend on how even the routing is,
    the weights read do.
    """
    x = cast(t, x, w.dtype)
    rows, inputs = x.axes
    axes = (rows, outputs)
    each = ceil_div(rows, experts)
    out = Value(
        t.tensor("expert output", axes, x.dtype), axes, x.dtype, x.requires_grad or w.requires_grad
    )
    made = [Gradient(v, t.gradient_of(v)) for v in (w, x) if v.requires_grad]
    costs = [Gemm(inputs, outputs, each, x.dtype, experts)] * w.requires_grad + [
        Gemm(each, inputs, outputs, x.dtype, experts)
    ] * x.requires_grad
    saves = [
        v.tensor
        for v, kept in ((x, w.requires_grad), (w, x.requires_grad), (offsets, out.requires_grad))
        if kept
    ]
    backward = tuple((ALLOC, g.tensor) for g in made if g.tensor is not None)
    t.append(
        "grouped_mm",
        (x, w, offsets),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=saves,
        costs=(Gemm(each, outputs, inputs, x.dtype, experts),),
        backward=backward,
        gradients=made,
        backward_costs=costs,
    )
    return out


def chunk(t: Tape, x: Value, sizes: tuple[Size, ...], name: str = "chunk") -> tuple[Value, ...]:
    """`torch.chunk` or `split` of the last axis: views; the gradients of the parts are
    concatenated."""
    parts = tuple(Value(x.tensor, (*x.axes[:-1], size), x.dtype, x.requires_grad) for size in sizes)
    if x.requires_grad:
        whole = t.gradient_of(x)
        t.append(
            name,
            (x,),
            parts,
            forward=(),
            backward=((ALLOC, whole),),
            gradients=(Gradient(x, whole),),
            backward_costs=(Move(2 * traffic(x)),),
        )
    return parts


def row_sum(t: Tape, x: Value) -> Value:
    """Sum over the last axis, kept as an axis of one; the gradient is an expanded view. Autocast
    makes it fp32."""
    source = x if t.policy.autocast is None else _wide(t, x)
    return t.op(
        "sum",
        (source,),
        (*x.axes[:-1], 1),
        source.dtype,
        gradients=(PASS,),
        costs=(Move(traffic(source)),),
    )


def _wide(t: Tape, x: Value) -> Value:
    return cast(t, x, FP32)


def divide_rows_(t: Tape, x: Value, rows: Value) -> Value:
    """`x /= rows` in place, one divisor a row: autograd keeps a copy of the old x and the
    divisor."""
    if not x.requires_grad:
        t.append("div_", (x, rows), (x,), forward=(), costs=(Move(2 * traffic(x)),))
        return x
    old = t.tensor("x before div_", x.axes, x.dtype)
    out = Value(x.tensor, x.axes, x.dtype, True)
    work = [t.tensor(n, x.axes, x.dtype, Role.WORKSPACE) for n in ("x / d", "x / d / d", "-g")]
    summed = t.tensor("product before the sum", x.axes, x.dtype, Role.WORKSPACE)
    to_x, to_rows = t.gradient_of(x), t.gradient_of(rows)
    backward = (
        *((ALLOC, w) for w in work),
        (ALLOC, summed),
        *((FREE, w) for w in work),
        (ALLOC, to_x),
        (ALLOC, to_rows),
        (FREE, summed),
    )
    t.append(
        "div_",
        (x, rows),
        (out,),
        forward=((ALLOC, old),),
        saves=(old, rows.tensor),
        costs=(Move(4 * traffic(x), 2),),
        backward=backward,
        gradients=(Gradient(x, to_x), Gradient(rows, to_rows)),
        backward_costs=(Move(12 * traffic(x), 6),),
    )
    t.touch(old)
    return out


def weigh_rows(t: Tape, x: Value, weights: Value) -> Value:
    """x times one routing weight a row, in the wider type of the two; both products exist before
    they are cast and summed."""
    dtype = promote(x.dtype, weights.dtype)
    out = Value(
        t.tensor("weighted output", x.axes, dtype),
        x.axes,
        dtype,
        x.requires_grad or weights.requires_grad,
    )
    full = [Gradient(v, t.gradient_of(v)) for v in (x, weights) if v.requires_grad]
    products = {
        id(g.of): t.tensor("product", x.axes, dtype, Role.WORKSPACE)
        for g in full
        if g.of is weights or x.dtype is not dtype
    }
    backward: list[tuple[str, Tensor]] = []
    for g in reversed(full):
        first = products.get(id(g.of), g.tensor)
        if first is not None:
            backward.append((ALLOC, first))
    fitting: list[
        tuple[str, Tensor]
    ] = []  # the engine's casts and sums, once both products are there
    for g in full:
        product = products.get(id(g.of))
        if product is not None and g.tensor is not None:
            fitting += [(ALLOC, g.tensor), (FREE, product)]
    saves = [
        v.tensor for v, kept in ((weights, x.requires_grad), (x, weights.requires_grad)) if kept
    ]
    t.append(
        "mul routing weights",
        (x, weights),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=saves,
        costs=(Move(traffic(x, out)),),
        backward=tuple(backward),
        gradients=full,
        backward_costs=(Move(3 * traffic(x, out), 3),),
    )
    if out.requires_grad:
        t.ops[-1].fitting = tuple(fitting)
    return out


def sum_over_choices(t: Tape, x: Value, tokens: Size, choices: Size) -> Value:
    """(tokens · choices, h) summed over a token's choices; the expanded gradient is copied by the
    view's backward. Autocast makes it fp32."""
    source = x if t.policy.autocast is None else _wide(t, x)
    return t.op(
        "sum over choices",
        (source,),
        (tokens, x.axes[-1]),
        source.dtype,
        gradients=(LIKE,),
        costs=(Move(traffic(source)),),
        backward_costs=(Move(2 * traffic(source)),),
    )
