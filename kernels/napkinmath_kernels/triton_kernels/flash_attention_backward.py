"""Triton kernels of FlashAttention's backward: dk and dv, then dq, without atomics, so that results
repeat bit for bit.

Grouped heads: the dK/dV program of a K/V head walks over its group of query heads. Source: Dao 2023
(arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .flash_attention_blocks import (
    LOG2_E,
    _is_edge,
    _is_visible,
    _keeps,
    _key_range,
    _load_rows,
    _query_range,
    _seed_of,
    _sequence,
    _store_rows,
    _tanh,
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
    dk, dv, k, v, key, q_start, do_start, lse_start, delta_start, q_stride, do_stride, start, inner,
    whole, stop, queries, keys, scale, cap, window, seed, threshold, kept_scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from start to stop give to dk and dv of a block of keys; tiles are
    (keys, queries).

    Only the blocks of queries before `inner` and from `whole` on branch to the mask. Rows past the
    end need none, since their lse is read as infinite, nor do keys past the end, since they are
    not stored.
    """
    for first in range(start, stop, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        q = _load_rows(q_start, first, q_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        do = _load_rows(do_start, first, do_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        lse = (
            tl.load(lse_start + row, mask=row < queries, other=float("inf")) * LOG2_E
        )  # exp2(score - inf) = 0 for rows that are not
        delta = tl.load(delta_start + row, mask=row < queries, other=0.0)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if CAPPED:
            tanh = _tanh(score * (scale / cap))
            weight = tl.exp2(tanh * cap - lse[None, :])
        else:
            weight = tl.exp2(score * scale - lse[None, :])
        if CAUSAL or WINDOWED:  # noqa: SIM102 - what is known at compile time apart from what is not
            if _is_edge(first, inner, whole, True):
                distance = (row + keys - queries)[None, :] - key[:, None]
                if CAUSAL:
                    weight = tl.where(distance >= 0, weight, 0.0)
                if WINDOWED:
                    weight = tl.where(distance < window, weight, 0.0)
                    if not CAUSAL:
                        weight = tl.where(-distance < window, weight, 0.0)
        if DROPOUT:
            keeps = _keeps(seed, row[None, :], key[:, None], threshold)
            kept = tl.where(keeps, weight * kept_scale, 0.0).to(do.dtype)
            dv = tl.dot(kept, do, dv, input_precision=PRECISION)
        else:
            dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=PRECISION)
        dweight = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if DROPOUT:
            dweight = tl.where(keeps, dweight * kept_scale, 0.0)
        dscore = weight * (dweight - delta[None, :])
        if CAPPED:
            dscore *= 1.0 - tanh * tanh
        dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _flash_backward_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_queries_ptr, cu_keys_ptr,
    seed_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride,
    do_batch_stride, do_head_stride, do_token_stride,
    dk_batch_stride, dk_head_stride, dk_token_stride,
    lse_batch, lse_head, queries, keys, scale, window, softcap, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
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
        start, inner, whole, stop = _query_range(
            first, queries, keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
        )
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
            heads = tl.num_programs(1) * GROUP
            seed = _seed_of(seed_ptr, batch, q_head, heads) if DROPOUT else 0
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, key, q_start, do_start, lse_ptr + statistics, delta_ptr + statistics,
                q_token_stride, do_token_stride, start, inner, whole, stop, queries, keys,
                scale * LOG2_E, softcap * LOG2_E, window, seed, threshold, kept_scale, CAUSAL,
                WINDOWED, CAPPED, DROPOUT, PRECISION, SIZE, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        at = batch64 * dk_batch_stride + head64 * dk_head_stride + first_key * dk_token_stride
        _store_rows(dk_ptr + at, first, dk_token_stride, keys, dk * scale, SIZE, BLOCK_N, BLOCK_D)
        _store_rows(dv_ptr + at, first, dk_token_stride, keys, dv, SIZE, BLOCK_N, BLOCK_D)


@triton.jit
def _accumulate_dq(
    dq, q, do, lse, delta, row, k_start, v_start, k_stride, v_stride, start, inner, whole, stop,
    queries, keys, scale, cap, window, seed, threshold, kept_scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from start to stop give to dq of a block of queries."""
    for first in range(start, stop, BLOCK_N):
        k = _load_rows(k_start, first, k_stride, keys, True, SIZE, BLOCK_N, BLOCK_D)
        v = _load_rows(v_start, first, v_stride, keys, True, SIZE, BLOCK_N, BLOCK_D)
        key = first + tl.arange(0, BLOCK_N)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            tanh = _tanh(score * (scale / cap))
            weight = tl.exp2(tanh * cap - lse[:, None])
        else:
            weight = tl.exp2(score * scale - lse[:, None])
        if _is_edge(first, inner, whole, WINDOWED):
            visible = _is_visible(
                row[:, None], key[None, :], queries, keys, window, CAUSAL, WINDOWED
            )
            weight = tl.where(visible, weight, 0.0)
        dweight = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            keeps = _keeps(seed, row[:, None], key[None, :], threshold)
            dweight = tl.where(keeps, dweight * kept_scale, 0.0)
        dscore = weight * (dweight - delta[:, None])
        if CAPPED:
            dscore *= 1.0 - tanh * tanh
        dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _flash_backward_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_queries_ptr, cu_keys_ptr,
    seed_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride,
    do_batch_stride, do_head_stride, do_token_stride,
    dq_batch_stride, dq_head_stride, dq_token_stride,
    lse_batch, lse_head, queries, keys, scale, window, softcap, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
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
        seed = _seed_of(seed_ptr, batch, head, tl.num_programs(1)) if DROPOUT else 0
        start, inner, whole, stop = _key_range(
            first_row, queries, keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
        )
        dq = _accumulate_dq(
            dq, q, do, lse, delta, row, k_start, v_start, k_token_stride, v_token_stride, start,
            inner, whole, stop, queries, keys, scale * LOG2_E, softcap * LOG2_E, window, seed,
            threshold, kept_scale, CAUSAL, WINDOWED, CAPPED, DROPOUT, PRECISION, SIZE, BLOCK_N,
            BLOCK_D,
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
