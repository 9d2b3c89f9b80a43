"""Losses of a head in chunks of logits, a row each, as in catalog/kernels.py."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64, DType
from napkinmath.base.expr import Size, ceil_div, maximum, minimum
from napkinmath.base.units import MIB
from napkinmath.catalog.kernel_cost import KernelCost, Saved, stored_bytes

CHUNK_BYTES = 256 * MIB
_CHUNK_COLUMNS, _CHUNK_ROWS = 64, 128


def loss_chunk_limit(vocabulary: int, dtype: DType, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows whose logits fit a chunk, where there are as many: a multiple of 128 if that many
    fit."""
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    rows = max(1, chunk_bytes // (padded * stored_bytes(dtype)))
    return rows - rows % _CHUNK_ROWS if rows >= _CHUNK_ROWS else rows


def _kept_gradients(
    rows: Size, hidden: Size, vocabulary: int, dtype: DType, stored: DType
) -> tuple[Saved, ...]:
    """Gradients that a forward makes and keeps: of the rows, and of a trained head's `vocabulary`
    rows."""
    of_rows = Saved(name="d hidden", axes=(rows, hidden), dtype=dtype, is_new=True)
    of_head = Saved(name="d weight", axes=(vocabulary, hidden), dtype=stored, is_new=True)
    return (of_rows, of_head) if vocabulary else (of_rows,)


def _head_copies(head: Size, num_chunks: Size, dtype: DType, stored: DType) -> Size:
    """Bytes of a head in the type of the products where it is stored in another, and of fp32 sums of
    its gradient over several chunks."""
    cast = head * stored_bytes(dtype) if stored is not dtype else 0
    wide = FP32 in (dtype, stored)
    return cast + (0 if wide else minimum(num_chunks - 1, 1) * head * 4)


def _thin_head(
    rows: Size,
    valid: Size,
    rank: Size,
    vocabulary: int,
    num_chunks: Size,
    dtype: DType,
    stored: DType | None,
) -> KernelCost:
    """What a trained adapter on the head adds: a second, thin head of `rank`, whose product is added
    to the logits."""
    item, stored = stored_bytes(dtype), stored or dtype
    if not rank:
        return KernelCost(
            saved=(), forward_flops=0, backward_flops=0, forward_moved=0, backward_moved=0
        )
    head, logits = vocabulary * rank, valid * vocabulary * item
    kept = rows * rank + head
    return KernelCost(
        saved=(
            Saved(name="d low", axes=(rows, rank), dtype=dtype, is_new=True),
            Saved(name="d b", axes=(vocabulary, rank), dtype=stored, is_new=True),
        ),
        forward_flops=6 * valid * head,
        backward_flops=kept,
        forward_moved=4 * logits + 3 * (valid * rank + num_chunks * head) * item,
        backward_moved=2 * kept * item,
        forward_temporary=(0 if valid is rows else 2 * valid * rank * item)
        + _head_copies(head, num_chunks, dtype, stored),
    )


def linear_cross_entropy(
    rows: Size,
    hidden: Size,
    vocabulary: int,
    dtype: DType,
    *,
    valid: Size | None = None,
    trains_head: bool = False,
    head_dtype: DType | None = None,
    adapter_rank: Size = 0,
    adapter_dtype: DType | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> KernelCost:
    """Head and loss by chunks of logits; the forward computes the gradients and keeps them. `valid`
    of `rows` targets are not ignored. An adapter of `adapter_rank` on the head is a second, thin
    one, which is trained.

    Temporaries beside the chunk: the rows' losses. With ignored rows: copies of the others, of their
    gradients and of their labels. The head in the type of the products where it is stored in
    another. fp32 sums of its gradient where there is more than one chunk. A count.
    """
    item, some_ignored = stored_bytes(dtype), valid is not None
    valid = rows if valid is None else valid
    stored = head_dtype or dtype
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    chunk = maximum(1, minimum(loss_chunk_limit(vocabulary, dtype, chunk_bytes), valid))
    num_chunks = ceil_div(valid, chunk)
    head = vocabulary * hidden
    saved = _kept_gradients(rows, hidden, vocabulary if trains_head else 0, dtype, stored)
    gathered = 2 * valid * hidden * item + valid * 16 if some_ignored else 0
    copies = _head_copies(head, num_chunks if trains_head else 1, dtype, stored)
    logits = valid * vocabulary * item
    kept = rows * hidden + (head if trains_head else 0)
    products = (2 + trains_head) * (valid * hidden + num_chunks * head)
    thin = _thin_head(rows, valid, adapter_rank, vocabulary, num_chunks, dtype, adapter_dtype)
    return KernelCost(
        saved=saved + thin.saved,
        forward_flops=(6 if trains_head else 4) * valid * hidden * vocabulary
        + thin.forward_flops
        + 8 * valid * vocabulary,
        backward_flops=kept + thin.backward_flops,
        forward_moved=(6 if trains_head else 5) * logits + products * item + thin.forward_moved,
        backward_moved=2 * kept * item + thin.backward_moved,
        forward_temporary=chunk * padded * item
        + valid * 4
        + gathered
        + copies
        + thin.forward_temporary,
    )


def linear_log_probabilities(
    rows: Size,
    hidden: Size,
    vocabulary: int,
    dtype: DType,
    *,
    trains_head: bool = False,
    head_dtype: DType | None = None,
    statistics: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> KernelCost:
    """Log-probabilities of every row's label by chunks of logits. With a frozen head the forward
    makes the rows' gradients and keeps them; the backward of a trained one makes the logits again.

    Temporaries: the chunk; the head in the type of the products where it is stored in another; for
    a trained head its gradient in fp32, where that is not the result, and a number for each row.
    """
    item, stored = stored_bytes(dtype), head_dtype or dtype
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    chunk = maximum(1, minimum(loss_chunk_limit(vocabulary, dtype, chunk_bytes), rows))
    num_chunks, head = ceil_div(rows, chunk), vocabulary * hidden
    product, logits = 2 * rows * head, rows * vocabulary * item
    read = rows * hidden * item + num_chunks * head * item
    results = rows * (13 if statistics else 4)
    buffer = chunk * padded * item + (head * item if stored is not dtype else 0)
    if not trains_head:
        return KernelCost(
            saved=(Saved(name="d hidden", axes=(rows, hidden), dtype=dtype, is_new=True),),
            forward_flops=2 * product + 8 * rows * vocabulary,
            backward_flops=rows * hidden,
            forward_moved=5 * logits + 2 * read + results,
            backward_moved=2 * rows * hidden * item + 4 * rows,
            forward_temporary=buffer,
        )
    sums = minimum(num_chunks - 1, 1) * head * 4
    return KernelCost(
        saved=(
            Saved(name="hidden", axes=(rows, hidden), dtype=dtype, is_new=False),
            Saved(name="weight", axes=(vocabulary, hidden), dtype=stored, is_new=False),
            Saved(name="targets", axes=(rows,), dtype=INT64, is_new=False),
        ),
        forward_flops=product + 4 * rows * vocabulary,
        backward_flops=3 * product + 8 * rows * vocabulary,
        forward_moved=2 * logits + read + results,
        backward_moved=6 * logits + 3 * read + 4 * rows,
        forward_temporary=buffer,
        backward_temporary=buffer
        + chunk * 4
        + (sums if dtype is not FP32 and stored is not FP32 else 0),
    )


def linear_divergence(
    rows: Size,
    hidden: Size,
    taught_hidden: Size,
    vocabulary: int,
    dtype: DType,
    *,
    valid: Size | None = None,
    trains_head: bool = False,
    head_dtype: DType | None = None,
    adapter_rank: Size = 0,
    adapter_dtype: DType | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> KernelCost:
    """Divergence of a student from a teacher by chunks of both models' logits; the forward computes
    the student's gradients and keeps them. `valid` of `rows` count; those are copied together. An adapter
    is as in `linear_cross_entropy`."""
    item, some_left_out = stored_bytes(dtype), valid is not None
    valid = rows if valid is None else valid
    stored = head_dtype or dtype
    padded = -(-vocabulary // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    chunk = maximum(1, minimum(loss_chunk_limit(vocabulary, dtype, chunk_bytes // 2), valid))
    num_chunks, head = ceil_div(valid, chunk), vocabulary * hidden
    taught_head, logits = vocabulary * taught_hidden, valid * vocabulary * item
    saved = _kept_gradients(rows, hidden, vocabulary if trains_head else 0, dtype, stored)
    gathered = valid * ((2 * hidden + taught_hidden) * item + 8) if some_left_out else 0
    copies = _head_copies(head, num_chunks if trains_head else 1, dtype, stored)
    products, trained = 2 + trains_head, head if trains_head else 0
    thin = _thin_head(rows, valid, adapter_rank, vocabulary, num_chunks, dtype, adapter_dtype)
    return KernelCost(
        saved=saved + thin.saved,
        forward_flops=2 * valid * (products * head + taught_head)
        + thin.forward_flops
        + 24 * valid * vocabulary,
        backward_flops=rows * hidden + trained + thin.backward_flops,
        forward_moved=(10 + trains_head) * logits
        + products * (valid * hidden + num_chunks * head) * item
        + (valid * taught_hidden + num_chunks * taught_head) * item
        + thin.forward_moved,
        backward_moved=2 * (rows * hidden + trained) * item + thin.backward_moved,
        forward_temporary=2 * chunk * padded * item
        + valid * 4
        + gathered
        + copies
        + thin.forward_temporary,
    )
