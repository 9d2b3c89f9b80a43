"""Triton kernel of FlashAttention's forward.

Grouped heads: query head h reads K/V head h // GROUP. Sinks are one more score a head, which takes
its share of the weights and gives nothing. With TMA, keys and values are tensor descriptors
(Hopper's and newer copy engine); else pointers. Sources: Dao 2023 (arXiv 2307.08691); Ainslie et
al. 2023 (arXiv 2305.13245) for grouped heads; Xiao et al. 2023 (arXiv 2309.17453) for sinks.
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
    _seed_of,
    _sequence,
    _store_rows,
    _tanh,
)


@triton.jit
def _keys_at(
    source, batch, head, first, stride, count,
    TMA: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of keys or values from row `first` on, zero past the end."""
    if TMA:
        return source.load([batch, head, first, 0]).reshape([BLOCK_N, BLOCK_D])
    else:
        return _load_rows(source, first, stride, count, True, SIZE, BLOCK_N, BLOCK_D)


@triton.jit
def _attend(
    acc, total, largest, q, row, k_source, v_source, batch, kv_head, k_stride, v_stride, start,
    inner, whole, stop, queries, keys, scale, cap, window, seed, threshold, kept_scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, DROPOUT: tl.constexpr,
    POSITIVE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys from start to stop; scaled scores are in units of log2, so that
    exp2 does.

    Only the blocks before `inner` and from `whole` on branch to the mask: of two loops behind one
    another ptxas would wait for each wgmma (C7515). A positive scale leaves the order of the
    scores: their largest is scaled alone, and the scores themselves in the multiply-add that
    subtracts it. Of another scale, or under a cap, each score is scaled first.
    """
    for first in range(start, stop, BLOCK_N):
        k = _keys_at(k_source, batch, kv_head, first, k_stride, keys, TMA, SIZE, BLOCK_N, BLOCK_D)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            score = _tanh(score * (scale / cap)) * cap
        elif not POSITIVE:
            score *= scale
        key = first + tl.arange(0, BLOCK_N)
        is_edge = _is_edge(first, inner, whole, WINDOWED)
        if is_edge:
            visible = _is_visible(
                row[:, None], key[None, :], queries, keys, window, CAUSAL, WINDOWED
            )
            score = tl.where(visible, score, float("-inf"))
        bigger = tl.max(score, 1)
        if POSITIVE:
            bigger *= scale
        bigger = tl.maximum(largest, bigger)
        # no key seen yet: -inf - -inf would be NaN
        reference = tl.where(is_edge & (bigger == float("-inf")), 0.0, bigger)
        weight = (
            tl.exp2(score * scale - reference[:, None])
            if POSITIVE
            else tl.exp2(score - reference[:, None])
        )
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weight, 1)
        if DROPOUT:
            weight = tl.where(
                _keeps(seed, row[:, None], key[None, :], threshold), weight * kept_scale, 0.0
            )
        v = _keys_at(v_source, batch, kv_head, first, v_stride, keys, TMA, SIZE, BLOCK_N, BLOCK_D)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        largest = bigger
    return acc, total, largest


@triton.jit
def _flash_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_queries_ptr, cu_keys_ptr, sinks_ptr, seed_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride,
    o_batch_stride, o_head_stride, o_token_stride,
    lse_batch, lse_head, queries, keys, scale, window, softcap, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, POSITIVE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
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
        kv_head = head // GROUP
        row = first_row + tl.arange(0, BLOCK_M)
        q_start = (
            q_ptr + batch64 * q_batch_stride + head64 * q_head_stride + first_query * q_token_stride
        )
        if TMA:
            k_source = k_ptr
            v_source = v_ptr
        else:
            k_source = (
                k_ptr
                + batch64 * k_batch_stride
                + (head64 // GROUP) * k_head_stride
                + first_key * k_token_stride
            )
            v_source = (
                v_ptr
                + batch64 * v_batch_stride
                + (head64 // GROUP) * v_head_stride
                + first_key * v_token_stride
            )
        q = _load_rows(q_start, first_row, q_token_stride, queries, True, SIZE, BLOCK_M, BLOCK_D)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        if SINKS:  # as if it had been the first key
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
            largest = tl.zeros([BLOCK_M], dtype=tl.float32) + sink
        else:
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        seed = _seed_of(seed_ptr, batch, head, tl.num_programs(1)) if DROPOUT else 0
        start, inner, whole, stop = _key_range(
            first_row, queries, keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
        )
        acc, total, largest = _attend(
            acc, total, largest, q, row, k_source, v_source, batch, kv_head, k_token_stride,
            v_token_stride, start, inner, whole, stop, queries, keys, scale * LOG2_E,
            softcap * LOG2_E, window, seed, threshold, kept_scale, CAUSAL, WINDOWED, CAPPED,
            DROPOUT, POSITIVE, TMA, PRECISION, SIZE, BLOCK_N, BLOCK_D,
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
