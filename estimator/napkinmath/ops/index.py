"""Look-ups and data movement: embeddings, concatenation, expansion of key/value heads, rotary
embedding."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64, DType
from napkinmath.base.expr import Size, minimum, product
from napkinmath.ir.costs import HostCopy, HostPass, Move, traffic
from napkinmath.ir.ledger import ALLOC, BATCH, Role, Tensor, Value, Weight
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.ops.elementwise import add, mul, neg, promote
from napkinmath.ops.nodes import node, result, same_storage, workspaces

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
        table = weight or t.weight("weight", (rows, width), kind=kind)
        if t.policy.config.offload.embeddings and not table.trainable:
            return _host_rows(t, ids, table, width)
        if table.constants:
            return _decoded_rows(t, ids, table, kind)
        w = table.value
        out = look_up(t, ids, w, width, padded=padded)
        return t.policy.embedding(t, ids, out, rows)


def _host_rows(t: Tape, ids: Value, table: Weight, width: Size) -> Value:
    """Rows of a table in host memory, gathered there and copied: the step waits for its ids to come,
    and for their rows to go. Source: kernels/napkinmath_kernels/patching/embeddings.py."""
    stored, dtype = table.tensor, table.tensor.dtype
    stored.host_bytes, stored.nbytes, stored.requested = stored.host_bytes or stored.nbytes, 0, 0
    found = t.tensor("embedding", (*ids.axes, width), dtype)
    out = Value(found, found.axes, dtype)
    moved = traffic(out)
    t.append(
        "rows of a table on the host",
        (ids,),
        (out,),
        forward=((ALLOC, found),),
        costs=(
            HostCopy(traffic(ids), to_host=True, overlaps=False),
            HostPass(2 * moved),
            HostCopy(moved, to_host=False, overlaps=False),
        ),
    )
    return out


def _decoded_rows(t: Tape, ids: Value, table: Weight, kind: str) -> Value:
    """Rows of an 8-bit table in the type that it had, decoded as they are gathered. Source:
    kernels/napkinmath_kernels/patching/embeddings.py EightBitEmbedding."""
    dtype = t.policy.parameter_dtype(kind)
    found = t.tensor("embedding", (*ids.axes, table.axes[-1]), dtype)
    out = Value(found, found.axes, dtype)
    read = product(found.axes) * table.tensor.dtype.bits // 8
    t.append(
        "rows of an 8-bit table",
        (ids, table.value),
        (out,),
        forward=((ALLOC, found),),
        costs=(Move(traffic(out) + read),),
    )
    return out


def look_up(t: Tape, ids: Value, w: Value, width: Size, *, padded: bool = False) -> Value:
    """`F.embedding`: rows of a table that is no module of its own."""
    out = result(t, "embedding", (*ids.axes, width), w.dtype, (w,))
    moved, needed = 2 * traffic(out), w.requires_grad
    node(
        t,
        "embedding",
        (ids, w),
        (out,),
        new=(out.tensor,),
        saves=(ids.tensor,),
        costs=(Move(moved),),
        differentiated=(w,),
        backward_workspace=_sorting(t, ids, width, padded) if needed else (),
        backward_costs=(Move(moved, 6),) if needed else (),
    )
    return out


def _sorting(t: Tape, ids: Value, width: Size, padded: bool) -> tuple[Tensor, ...]:
    """What the dense gradient of a table sorts and adds up in: few ids need nothing, unless one
    pads."""
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
    partial_sums = t.tensor("partial sums", (count, width), FP32, Role.WORKSPACE)
    return (*workspaces(t, (count,), INT64, tables), partial_sums)


def input_leaf(t: Tape, x: Value, *, of_pixels: bool = False) -> Value:
    """The embedding's output made to need a gradient, where the policy asks for it; autograd holds
    such a leaf to the end. `of_pixels`: pixels are the model's main input."""
    policy = t.policy
    asked = policy.pixels_require_grad if of_pixels else policy.inputs_require_grad
    if not asked or x.requires_grad:
        return x
    out = Value(x.tensor, x.axes, x.dtype, True)
    t.append("requires_grad_", (x,), (out,), forward=(), saves=(x.tensor,))
    t.leaves.add(out)
    return out


def concatenate(
    t: Tape, parts: tuple[Value, ...], axes: tuple[Size, ...], *, name: str = "cat"
) -> Value:
    """`torch.cat`: a new tensor of the widest part's type; the gradients of the parts are slices of
    the incoming one, those of narrower parts cast."""
    moved, dtype = 2 * traffic(*parts), parts[0].dtype
    for part in parts[1:]:
        dtype = promote(dtype, part.dtype)
    gradients = [PASS if part.dtype is dtype else LIKE for part in parts]
    return t.op(name, parts, axes, dtype, gradients=gradients, costs=(Move(moved),))


def slice_of(t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
    """A slice: a view forward; backward writes the slice's gradient into zeros as large as the
    whole (slice_backward)."""
    out = same_storage(x, axes=axes)
    if x.requires_grad:
        node(t, "slice", (x,), (out,), backward_costs=(Move(traffic(x) + traffic(out), 2),))
    return out


def rows_of(t: Tape, x: Value, name: str) -> Value:
    """`x[index]` for an order of its rows: a copy; the gradient is put back into zeros."""
    places = constant(t, name, (product(x.axes[:-1]),), INT64)
    return t.op(
        "index",
        (x,),
        x.axes,
        x.dtype,
        saves=(places,),
        gradients=(LIKE,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(3 * traffic(x), 2),),
    )


def masked_scatter(t: Tape, x: Value, source: Value, mask: Value) -> Value:
    """`torch.masked_scatter`: a copy of x in which rows of `source` take the places of the mask, as
    wide as x's last axis.

    CUDA counts the places element by element (IndexKernel.cpp masked_scatter__cuda,
    IndexKernel.cu launch_masked_scatter_kernel: an int64 prefix sum over the mask in full).
    """
    counted = workspaces(t, x.axes, BOOL, ("mask in full",))
    counted += workspaces(t, x.axes, INT64, ("prefix sums of the mask",))
    return t.op(
        "masked_scatter",
        (x, source),
        x.axes,
        x.dtype,
        saves=(mask,),
        gradients=(LIKE, LIKE),
        costs=(Move(2 * traffic(x) + sum(tensor.nbytes for tensor in counted)),),
        backward_costs=(Move(3 * traffic(x), 2),),
        temporaries=counted,
    )


def chunk(t: Tape, x: Value, sizes: tuple[Size, ...], name: str = "chunk") -> tuple[Value, ...]:
    """`torch.chunk` or `split` of the last axis: views; the gradients of the parts are
    concatenated."""
    return _parts(t, x, name, [(*x.axes[:-1], size) for size in sizes])


def split_rows(t: Tape, x: Value, sizes: tuple[Size, ...]) -> tuple[Value, ...]:
    """`chunk` of the first axis."""
    return _parts(t, x, "split", [(size, *x.axes[1:]) for size in sizes])


def _parts(t: Tape, x: Value, name: str, axes: list[tuple[Size, ...]]) -> tuple[Value, ...]:
    parts = tuple(same_storage(x, axes=each) for each in axes)
    if x.requires_grad:
        node(t, name, (x,), parts, backward_costs=(Move(2 * traffic(x)),))
    return parts


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
    out = result(t, "repeated heads", axes, x.dtype, (x,))
    node(
        t,
        "repeat_kv",
        (x,),
        (out,),
        new=(out.tensor,),
        costs=(Move(2 * traffic(out)),),
        backward_costs=(Move(traffic(out, x)),),
    )
    return out


def single_head(t: Tape, x: Value) -> bool:
    """Whether all queries share one key/value head, which expands without a copy."""
    return t.known(x.axes[1]) == 1


def expand_head(t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
    """One head seen by all queries: a view; the gradient is summed over the heads."""
    out = same_storage(x, axes=axes)
    node(t, "expand", (x,), (out,), backward_costs=(Move(traffic(out, x)),))
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
