"""What the FlashAttention kernels share: reading and writing rows, which keys a query sees, soft
caps, dropout.

Query row i of a sequence of S queries and T keys stands at position i + T - S: causal attention is
aligned at the lower right, as in FlashAttention-2. A window of w keeps the keys less than w
positions away. Packed sequences: rows of sequence b are cu_seqlens[b] to cu_seqlens[b + 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(
    start_ptr,
    first,
    stride,
    count,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_R rows of BLOCK_D values from row `first` on, the values past SIZE as zero; rows past
    `count` too if MASKED.

    The way to the first row is one 64-bit number: rows times stride passes 2^31 where a long
    sequence has many heads.
    """
    column = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_R)
    at = start_ptr + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    if MASKED:
        return tl.load(
            at, mask=(first + row < count)[:, None] & (column < SIZE)[None, :], other=0.0
        )
    elif SIZE == BLOCK_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(column < SIZE)[None, :], other=0.0)


@triton.jit
def _store_rows(
    start_ptr,
    first,
    stride,
    count,
    values,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The counterpart of `_load_rows`, masked."""
    column = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_R)
    at = start_ptr + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    mask = (first + row < count)[:, None] & (column < SIZE)[None, :]
    tl.store(at, values.to(start_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _is_visible(row, key, queries, keys, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether the query at `row` sees the key, both broadcast to a tile."""
    visible = (key < keys) & (row < queries)
    position = row + keys - queries
    if CAUSAL:
        visible = visible & (key <= position)
    if WINDOWED:
        visible = visible & (position - key < window)
        if not CAUSAL:
            visible = visible & (key - position < window)
    return visible


@triton.jit
def _sequence(cu_queries_ptr, cu_keys_ptr, batch, queries, keys, VARLEN: tl.constexpr):
    """(first query row, first key row, number of queries, number of keys) of a sequence."""
    if VARLEN:
        first_query = tl.load(cu_queries_ptr + batch).to(tl.int64)
        first_key = tl.load(cu_keys_ptr + batch).to(tl.int64)
        num_queries = (tl.load(cu_queries_ptr + batch + 1) - first_query).to(tl.int32)
        num_keys = (tl.load(cu_keys_ptr + batch + 1) - first_key).to(tl.int32)
        return first_query, first_key, num_queries, num_keys
    else:
        zero = batch.to(tl.int64) * 0
        return zero, zero, queries, keys


@triton.jit
def _key_range(
    first_row,
    queries,
    keys,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(start, start of the blocks that need no mask, their end, end) of the keys that a block of
    queries sees."""
    position = first_row + keys - queries
    start = 0
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, tl.maximum(position + BLOCK_M, 0))
        whole = tl.minimum(keys, tl.maximum(position + 1, 0)) // BLOCK_N * BLOCK_N
    else:
        whole = keys // BLOCK_N * BLOCK_N
    if WINDOWED:
        start = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        if not CAUSAL:
            stop = tl.minimum(keys, tl.maximum(position + BLOCK_M - 1 + window, 0))
            whole = tl.minimum(keys, tl.maximum(position + window, 0)) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(tl.maximum(position + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
        return start, inner, tl.maximum(whole, inner), stop
    else:
        return start, start, whole, stop


@triton.jit
def _query_range(
    first, queries, keys, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(start, start of the blocks that need no mask, their end, end) of the queries that see a
    block of keys from `first` on."""
    nearest = first - (keys - queries)  # the query that stands at the first key
    start = 0
    inner = 0
    whole = queries
    stop = queries
    if CAUSAL:
        start = tl.maximum(nearest, 0) // BLOCK_M * BLOCK_M
        inner = nearest + BLOCK_N - 1
    if WINDOWED:
        if not CAUSAL:
            start = tl.maximum(nearest - window + 1, 0) // BLOCK_M * BLOCK_M
            inner = nearest + BLOCK_N - window
        whole = nearest + window - BLOCK_M + 1
        stop = tl.minimum(queries, tl.maximum(nearest + BLOCK_N - 1 + window, 0))
    return start, inner, whole, stop


@triton.jit
def _is_edge(first, inner, whole, WINDOWED: tl.constexpr):
    """Whether a block from `first` on needs a mask."""
    if WINDOWED:
        return (first < inner) | (first >= whole)
    else:
        return first >= whole


@triton.jit
def _tanh(x):
    """tanh by exp2, to one rounding of 1: the interpreter has no device library. exp2 of what is
    large is infinite, which gives 1."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def _keeps(seed, row, key, threshold):
    """Which weights stay, by Philox at (key, query) under a head's own seed: the same in every
    kernel, whatever its tiles."""
    row, key = tl.broadcast(row, key)
    random, _, _, _ = tl.philox(seed, key, row, key * 0, key * 0)
    return (random >> 8).to(tl.int32) >= threshold


@triton.jit
def _seed_of(seed_ptr, batch, head, heads):
    """The seed of a head of a sequence: the call's, and their number in the upper half."""
    return tl.load(seed_ptr) + ((batch.to(tl.int64) * heads + head) << 32)
