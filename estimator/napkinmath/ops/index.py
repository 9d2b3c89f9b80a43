"""Look-ups and data movement: embeddings, concatenation, expansion of key/value heads, rotary
embedding."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64, DType
from napkinmath.base.expr import Size, minimum, product
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, BATCH, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.tape import PASS, Tape
from napkinmath.ops.elementwise import add, mul, neg

# aten/src/ATen/native/cuda/Embedding.cu: fewer are added up without a sort, unless one id pads
MAX_UNSORTED_INDICES = 3072


def embedding(
    t: Tape,
    ids: Value,
    name: str,
    rows: Size,
    width: Size,
    *,
    kind: str = "embedding",
    padded: bool = False,
    weight: Weight | None = None,
) -> Value:
    """`nn.Embedding`: keeps the ids; the gradient is dense, with tables of sorted ids and partial
    sums while it is made.

    `padded`: it has a padding index. `weight`: the table of another module, declared by the caller.
    Source: aten/src/ATen/native/cuda/Embedding.cu embedding_dense_backward_cuda and
    EmbeddingBackwardKernel.cu embedding_backward_cuda_kernel.
    """
    with t.scope(name):
        w = (weight or t.weight("weight", (rows, width), kind=kind)).value
        axes = (*ids.axes, width)
        tensor = t.tensor("embedding", axes, w.dtype)
        out = Value(tensor, axes, w.dtype, w.requires_grad)
        gradients: list[Gradient] = []
        backward: list[tuple[str, Tensor]] = []
        if w.requires_grad:
            made = t.gradient_of(w)
            count = product(ids.axes)
            if not padded:
                count = count * minimum(1, count // (MAX_UNSORTED_INDICES + 1))
            tables = (
                "sorted ids",
                "sorted positions",
                "segment offsets",
                "partials per segment",
                "partial offsets",
                "partial segments",
            )
            temporaries = [t.tensor(n, (count,), INT64, Role.WORKSPACE) for n in tables]
            temporaries.append(t.tensor("partial sums", (count, width), FP32, Role.WORKSPACE))
            backward = [
                (ALLOC, made),
                *((ALLOC, x) for x in temporaries),
                *((FREE, x) for x in temporaries),
            ]
            gradients = [Gradient(w, made)]
        moved = 2 * traffic(out)
        t.append(
            "embedding",
            (ids, w),
            (out,),
            forward=((ALLOC, tensor),),
            saves=(ids.tensor,) if w.requires_grad else (),
            costs=(Move(moved),),
            backward=tuple(backward),
            gradients=gradients,
            backward_costs=(Move(moved, 6),) if w.requires_grad else (),
        )
        return t.policy.embedding(t, ids, out, rows)


def input_leaf(t: Tape, x: Value) -> Value:
    """The embedding's output made to need a gradient, where the policy asks for it; autograd holds
    such a leaf to the end."""
    if not t.policy.inputs_require_grad or x.requires_grad:
        return x
    out = Value(x.tensor, x.axes, x.dtype, True)
    t.append("requires_grad_", (x,), (out,), forward=(), saves=(x.tensor,))
    return out


def concatenate(
    t: Tape, parts: tuple[Value, ...], axes: tuple[Size, ...], *, name: str = "cat"
) -> Value:
    """`torch.cat`: a new tensor; the gradients of the parts are slices of the incoming one."""
    moved = 2 * traffic(*parts)
    return t.op(
        name, parts, axes, parts[0].dtype, gradients=(PASS,) * len(parts), costs=(Move(moved),)
    )


def slice_of(t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
    """A slice: a view forward; backward writes the slice's gradient into zeros as large as the
    whole (slice_backward)."""
    out = Value(x.tensor, axes, x.dtype, x.requires_grad)
    if x.requires_grad:
        whole = t.gradient_of(x)
        t.append(
            "slice",
            (x,),
            (out,),
            forward=(),
            backward=((ALLOC, whole),),
            gradients=(Gradient(x, whole),),
            backward_costs=(Move(traffic(x) + traffic(out), 2),),
        )
    return out


def rotate_half(t: Tape, x: Value) -> Value:
    """transformers' rotate_half: two halves, one negated, concatenated."""
    half = (*x.axes[:-1], x.axes[-1] // 2)
    with t.scope() as frame:
        first, second = slice_of(t, x, half), slice_of(t, x, half)
        frame.local(first, second)
        return concatenate(t, (neg(t, second), first), x.axes)


def rotary(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """x * cos + rotate_half(x) * sin, op by op, as transformers' apply_rotary_pos_emb does."""
    return add(t, mul(t, x, cos), mul(t, rotate_half(t, x), sin))


def repeat_heads(
    t: Tape, x: Value, groups: Size, axes: tuple[Size, ...], *, copies: bool = False
) -> Value:
    """`repeat_kv`: expands key/value heads into a copy, a single head (unless `copies`) into a
    view; the gradient is summed over each group."""
    if groups == 1:
        return x
    if single_head(t, x) and not copies:
        return expand_head(t, x, axes)
    summed = t.gradient_of(x) if x.requires_grad else None
    tensor = t.tensor("repeated heads", axes, x.dtype)
    out = Value(tensor, axes, x.dtype, x.requires_grad)
    t.append(
        "repeat_kv",
        (x,),
        (out,),
        forward=((ALLOC, tensor),),
        costs=(Move(2 * traffic(out)),),
        backward=((ALLOC, summed),) if summed else (),
        gradients=(Gradient(x, summed),) if summed else (),
        backward_costs=(Move(traffic(out, x)),),
    )
    return out


def single_head(t: Tape, x: Value) -> bool:
    """Whether all queries share one key/value head, which expands without a copy."""
    return t.known(x.axes[1]) == 1


def expand_head(t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
    """One head seen by all queries: a view; the gradient is summed over the heads."""
    out = Value(x.tensor, axes, x.dtype, x.requires_grad)
    summed = t.gradient_of(x) if x.requires_grad else None
    t.append(
        "expand",
        (x,),
        (out,),
        forward=(),
        backward=((ALLOC, summed),) if summed else (),
        gradients=(Gradient(x, summed),) if summed else (),
        backward_costs=(Move(traffic(out, x)),),
    )
    return out


def model_input(t: Tape, name: str, axes: tuple[Size, ...], dtype: DType) -> Value:
    """A tensor of the batch, which the caller holds through the step."""
    out = constant(t, name, axes, dtype)
    out.tensor.source = BATCH
    return out


def constant(
    t: Tape, name: str, axes: tuple[Size, ...], dtype: DType, role: Role = Role.ACTIVATIONS
) -> Value:
    """A new tensor without a gradient (arange, a mask, cos and sin tables)."""
    out = Value(t.tensor(name, axes, dtype, role), axes, dtype)
    t.append(name, (), (out,), forward=((ALLOC, out.tensor),), costs=(Move(traffic(out)),))
    return out
