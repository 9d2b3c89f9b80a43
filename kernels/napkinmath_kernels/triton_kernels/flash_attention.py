"""Triton kernels of FlashAttention: forward, and a backward of two kernels without atomics, so that
results repeat bit for bit.

Query row i of a sequence of S queries and T keys stands at position i + T - S: causal attention is
aligned at the lower right, as in FlashAttention-2. A window of w keeps the keys less than w
positions away. Grouped heads: query head h reads K/V head h // GROUP, and the dK/dV program of a
K/V head walks over its group. Packed sequences: rows of sequence b are cu_seqlens[b] to
cu_seqlens[b + 1]. Sources: Dao 2023 (arXiv 2307.08691); Ainslie et al. 2023 (arXiv 2305.13245) for
grouped heads.
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
def _attend(
    acc, total, largest, q, row, k_start, v_start, k_stride, v_stride, start, stop, queries, keys,
    scale, window,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, POSITIVE: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys from start to stop; scaled scores are in units of log2, so that
    exp2 does.

    A positive scale leaves the order of the scores: their largest is scaled alone, and the scores
    themselves in the multiply-add that subtracts it. Of another scale each score is scaled first.
    """
    for first in range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k = _load_rows(k_start, first, k_stride, keys, MASKED, SIZE, BLOCK_N, BLOCK_D)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not POSITIVE:
            score *= scale
        if MASKED:
            visible = _is_visible(
                row[:, None], key[None, :], queries, keys, window, CAUSAL, WINDOWED
            )
            score = tl.where(visible, score, float("-inf"))
        bigger = tl.max(score, 1)
        if POSITIVE:
            bigger *= scale
        bigger = tl.maximum(largest, bigger)
        reference = bigger
        if MASKED:
            reference = tl.where(
                bigger == float("-inf"), 0.0, bigger
            )  # no key seen yet: -inf - -inf would be NaN
        weight = (
            tl.exp2(score * scale - reference[:, None])
            if POSITIVE
            else tl.exp2(score - reference[:, None])
        )
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weight, 1)
        v = _load_rows(v_start, first, v_stride, keys, MASKED, SIZE, BLOCK_N, BLOCK_D)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        largest = bigger
    return acc, total, largest


@triton.jit
def _flash_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_queries_ptr, cu_keys_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride,
    o_batch_stride, o_head_stride, o_token_stride,
    lse_batch, lse_head, queries, keys, scale, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr,
    POSITIVE: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """o = softmax(scale q k^T) v and its log-sum-exp for a block of queries of one head."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first_query, first_key, queries, keys = _sequence(
        cu_queries_ptr, cu_keys_ptr, batch, queries, keys, VARLEN
    )
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # causal: the longest rows first
    first_row = block * BLOCK_M
    if first_row < queries:
        batch64 = batch.to(tl.int64)
        head64 = head.to(tl.int64)
        row = first_row + tl.arange(0, BLOCK_M)
        q_start = (
            q_ptr + batch64 * q_batch_stride + head64 * q_head_stride + first_query * q_token_stride
        )
        k_start = (
            k_ptr
            + batch64 * k_batch_stride
            + (head64 // GROUP) * k_head_stride
            + first_key * k_token_stride
        )
        v_start = (
            v_ptr
            + batch64 * v_batch_stride
            + (head64 // GROUP) * v_head_stride
            + first_key * v_token_stride
        )
        q = _load_rows(q_start, first_row, q_token_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        scale2 = scale * LOG2_E
        start, inner, whole, stop = _key_range(
            first_row, queries, keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
        )
        if WINDOWED:
            acc, total, largest = _attend(
                acc, total, largest, q, row, k_start, v_start, k_token_stride, v_token_stride,
                start, tl.minimum(inner, stop), queries, keys, scale2, window, True, CAUSAL,
                WINDOWED, POSITIVE, PRECISION, SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        acc, total, largest = _attend(
            acc, total, largest, q, row, k_start, v_start, k_token_stride, v_token_stride, inner,
            whole, queries, keys, scale2, window, False, CAUSAL, WINDOWED, POSITIVE, PRECISION,
            SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, total, largest = _attend(
            acc, total, largest, q, row, k_start, v_start, k_token_stride, v_token_stride, whole,
            stop, queries, keys, scale2, window, True, CAUSAL, WINDOWED, POSITIVE, PRECISION, SIZE,
            BLOCK_N, BLOCK_D,
        )  # fmt: skip
        seen = total != 0.0
        o = acc / tl.where(seen, total, 1.0)[:, None]
        lse = tl.where(seen, largest / LOG2_E + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
        o_start = (
            o_ptr + batch64 * o_batch_stride + head64 * o_head_stride + first_query * o_token_stride
        )
        _store_rows(o_start, first_row, o_token_stride, queries, o, SIZE, BLOCK_M, BLOCK_D)
        tl.store(
            lse_ptr + batch64 * lse_batch + head64 * lse_head + first_query + row,
            lse,
            mask=row < queries,
        )


@triton.jit
def _flash_delta(
    o_ptr,
    do_ptr,
    dlse_ptr,
    delta_ptr,
    cu_queries_ptr,
    o_batch_stride,
    o_head_stride,
    o_token_stride,
    do_batch_stride,
    do_head_stride,
    do_token_stride,
    lse_batch,
    lse_head,
    queries,
    HAS_DLSE: tl.constexpr,
    VARLEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """delta = sum(o do) - dlse for a block of queries of one head: what the softmax's gradient
    subtracts."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first_query, _, queries, _ = _sequence(
        cu_queries_ptr, cu_queries_ptr, batch, queries, queries, VARLEN
    )
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    o_start = (
        o_ptr + batch64 * o_batch_stride + head64 * o_head_stride + first_query * o_token_stride
    )
    do_start = (
        do_ptr + batch64 * do_batch_stride + head64 * do_head_stride + first_query * do_token_stride
    )
    o = _load_rows(o_start, first_row, o_token_stride, queries, True, SIZE, BLOCK_M, BLOCK_D).to(
        tl.float32
    )
    do = _load_rows(do_start, first_row, do_token_stride, queries, True, SIZE, BLOCK_M, BLOCK_D).to(
        tl.float32
    )
    delta = tl.sum(o * do, 1)
    at = batch64 * lse_batch + head64 * lse_head + first_query + row
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=row < queries, other=0.0)
    tl.store(delta_ptr + at, delta, mask=row < queries)


@triton.jit
def _accumulate_dkdv(
    dk, dv, k, v, key, q_start, do_start, lse_start, delta_start, q_stride, do_stride, start, stop,
    queries, keys, scale, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from start to stop give to dk and dv of a block of keys; tiles are
    (keys, queries).

    One loop with a cheap mask, not a masked and an unmasked one: two held too many addresses in
    registers and spilled. Rows past the end need no mask, since their lse is read as infinite, nor
    do keys past the end, since they are not stored.
    """
    for first in range(start, stop, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        q = _load_rows(q_start, first, q_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        do = _load_rows(do_start, first, do_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        lse = (
            tl.load(lse_start + row, mask=row < queries, other=float("inf")) * LOG2_E
        )  # exp2(score - inf) = 0 for rows that are not
        delta = tl.load(delta_start + row, mask=row < queries, other=0.0)
        weight = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
        distance = (row + keys - queries)[None, :] - key[:, None]
        if CAUSAL:
            weight = tl.where(distance >= 0, weight, 0.0)
        if WINDOWED:
            weight = tl.where(distance < window, weight, 0.0)
            if not CAUSAL:
                weight = tl.where(-distance < window, weight, 0.0)
        dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=PRECISION)
        dweight = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        dscore = weight * (dweight - delta[None, :])
        dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _flash_backward_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_queries_ptr, cu_keys_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride,
    do_batch_stride, do_head_stride, do_token_stride,
    dk_batch_stride, dk_head_stride, dk_token_stride,
    lse_batch, lse_head, queries, keys, scale, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one K/V head, summed over the query heads of its group."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first_query, first_key, queries, keys = _sequence(
        cu_queries_ptr, cu_keys_ptr, batch, queries, keys, VARLEN
    )
    first = tl.program_id(0) * BLOCK_N
    if first < keys:
        batch64 = batch.to(tl.int64)
        head64 = head.to(tl.int64)
        key = first + tl.arange(0, BLOCK_N)
        k_start = (
            k_ptr + batch64 * k_batch_stride + head64 * k_head_stride + first_key * k_token_stride
        )
        v_start = (
            v_ptr + batch64 * v_batch_stride + head64 * v_head_stride + first_key * v_token_stride
        )
        k = _load_rows(k_start, first, k_token_stride, keys, True, SIZE, BLOCK_N, BLOCK_D)
        v = _load_rows(v_start, first, v_token_stride, keys, True, SIZE, BLOCK_N, BLOCK_D)
        dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        offset = keys - queries
        start = 0
        stop = queries
        if CAUSAL:
            start = tl.maximum(first - offset, 0) // BLOCK_M * BLOCK_M
        if WINDOWED:
            if not CAUSAL:
                start = tl.maximum(first - offset - window + 1, 0) // BLOCK_M * BLOCK_M
            stop = tl.minimum(queries, tl.maximum(first + BLOCK_N - 1 + window - offset, 0))
        for member in range(GROUP):
            q_head = head64 * GROUP + member
            q_start = (
                q_ptr
                + batch64 * q_batch_stride
                + q_head * q_head_stride
                + first_query * q_token_stride
            )
            do_start = (
                do_ptr
                + batch64 * do_batch_stride
                + q_head * do_head_stride
                + first_query * do_token_stride
            )
            statistics = batch64 * lse_batch + q_head * lse_head + first_query
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, key, q_start, do_start, lse_ptr + statistics, delta_ptr + statistics,
                q_token_stride, do_token_stride, start, stop, queries, keys, scale * LOG2_E, window,
                CAUSAL, WINDOWED, PRECISION, SIZE, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        at = batch64 * dk_batch_stride + head64 * dk_head_stride + first_key * dk_token_stride
        _store_rows(dk_ptr + at, first, dk_token_stride, keys, dk * scale, SIZE, BLOCK_N, BLOCK_D)
        _store_rows(dv_ptr + at, first, dk_token_stride, keys, dv, SIZE, BLOCK_N, BLOCK_D)


@triton.jit
def _accumulate_dq(
    dq,
    q,
    do,
    lse,
    delta,
    row,
    k_start,
    v_start,
    k_stride,
    v_stride,
    start,
    stop,
    queries,
    keys,
    scale,
    window,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds what the keys from start to stop give to dq of a block of queries."""
    for first in range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k = _load_rows(k_start, first, k_stride, keys, MASKED, SIZE, BLOCK_N, BLOCK_D)
        v = _load_rows(v_start, first, v_stride, keys, MASKED, SIZE, BLOCK_N, BLOCK_D)
        weight = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            visible = _is_visible(
                row[:, None], key[None, :], queries, keys, window, CAUSAL, WINDOWED
            )
            weight = tl.where(visible, weight, 0.0)
        dweight = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dscore = weight * (dweight - delta[:, None])
        dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _flash_backward_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_queries_ptr, cu_keys_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride,
    do_batch_stride, do_head_stride, do_token_stride,
    dq_batch_stride, dq_head_stride, dq_token_stride,
    lse_batch, lse_head, queries, keys, scale, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first_query, first_key, queries, keys = _sequence(
        cu_queries_ptr, cu_keys_ptr, batch, queries, keys, VARLEN
    )
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = block * BLOCK_M
    if first_row < queries:
        batch64 = batch.to(tl.int64)
        head64 = head.to(tl.int64)
        row = first_row + tl.arange(0, BLOCK_M)
        q_start = (
            q_ptr + batch64 * q_batch_stride + head64 * q_head_stride + first_query * q_token_stride
        )
        do_start = (
            do_ptr
            + batch64 * do_batch_stride
            + head64 * do_head_stride
            + first_query * do_token_stride
        )
        k_start = (
            k_ptr
            + batch64 * k_batch_stride
            + (head64 // GROUP) * k_head_stride
            + first_key * k_token_stride
        )
        v_start = (
            v_ptr
            + batch64 * v_batch_stride
            + (head64 // GROUP) * v_head_stride
            + first_key * v_token_stride
        )
        statistics = batch64 * lse_batch + head64 * lse_head + first_query + row
        q = _load_rows(q_start, first_row, q_token_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        do = _load_rows(do_start, first_row, do_token_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_ptr + statistics, mask=row < queries, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + statistics, mask=row < queries, other=0.0)
        dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        start, inner, whole, stop = _key_range(
            first_row, queries, keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
        )
        if WINDOWED:
            dq = _accumulate_dq(
                dq, q, do, lse, delta, row, k_start, v_start, k_token_stride, v_token_stride, start,
                tl.minimum(inner, stop), queries, keys, scale * LOG2_E, window, True, CAUSAL,
                WINDOWED, PRECISION, SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        dq = _accumulate_dq(
            dq, q, do, lse, delta, row, k_start, v_start, k_token_stride, v_token_stride, inner,
            whole, queries, keys, scale * LOG2_E, window, False, CAUSAL, WINDOWED, PRECISION, SIZE,
            BLOCK_N, BLOCK_D,
        )  # fmt: skip
        dq = _accumulate_dq(
            dq, q, do, lse, delta, row, k_start, v_start, k_token_stride, v_token_stride, whole,
            stop, queries, keys, scale * LOG2_E, window, True, CAUSAL, WINDOWED, PRECISION, SIZE,
            BLOCK_N, BLOCK_D,
        )  # fmt: skip
        dq_start = (
            dq_ptr
            + batch64 * dq_batch_stride
            + head64 * dq_head_stride
            + first_query * dq_token_stride
        )
        _store_rows(
            dq_start, first_row, dq_token_stride, queries, dq * scale, SIZE, BLOCK_M, BLOCK_D
        )
