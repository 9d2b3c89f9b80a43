"""Seconds of scaled dot-product attention on a GPU, for sizes as numbers or numpy arrays: tiles of
queries that fill the SMs in waves, with work per score that products do not overlap."""

from __future__ import annotations

from itertools import pairwise

from napkinmath.timing import attainable
from napkinmath.timing.efficiency import (
    bytes_of,
    efficiency_of,
    elementwise_s,
    gemm_s,
    larger,
    matmul_key,
    smaller,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.config.hardware import Gpu
    from napkinmath.timing.efficiency import Efficiency, Seconds, Sizes

# Queries of one tile. Backward, loading and storing a tile cost what so many more keys would: 190,
# 239, 264, 280, 299 TFLOP/s at 512 to 8k on H100, 53, 63, 70, 75, 77 on RTX A5000 (flash-attention
# PR 2688, gpu-mode/ring-attention issue 10).
_ATTENTION_TILE = 128
_TILE_START_KEYS_BACKWARD = 250.0
# Kernels exist for these head sizes; others are padded in shared memory to the next (flash-attn
# csrc/flash_attn, FlashAttention-3 hopper/static_switch.h; sizes 72 and 80 of encoders take the time
# of 96 on A100, H100, L40S and B200, ai-dynamo/aiconfigurator).
_HEAD_SIZES = (32, 64, 96, 128, 192, 256)
# Tiles of unequal length leave SMs idle at the end: causal against full at 16k, FA2 335 of 370,
# cuDNN 539 of 595, FA3 616 of 648.
_CAUSAL_BALANCE = 0.94


def attention_s(
    kind: str,
    b: Sizes,
    heads: Sizes,
    kv_heads: Sizes,
    s_q: Sizes,
    s_kv: Sizes,
    head_dim: Sizes,
    causal: bool,
    window: Sizes | None,
    dtype: DType | str,
    backward: bool,
    gpu: Gpu | Efficiency,
) -> Seconds:
    """Seconds of scaled dot-product attention by a kernel: flash (or flash2), flash3, efficient,
    cudnn, math.

    `window` is the number of keys a query sees, itself included. `backward` is backward alone, not
    both.
    """
    e = efficiency_of(gpu)
    if kind in ("math", "eager"):
        return _math_attention_s(b * heads, s_q, s_kv, head_dim, causal, dtype, backward, e)
    clocks = _clocks_per_score(e, kind, head_dim, dtype, backward)
    keys = _mean_keys(s_q, s_kv, causal, window) + (
        _TILE_START_KEYS_BACKWARD if backward else e.attention_curve(kind).start_keys
    )
    tiles = b * heads * -(-s_q // _ATTENTION_TILE)
    busy = _wave_share(tiles, e.gpu.num_sms) * (_CAUSAL_BALANCE if causal else 1.0)
    compute = tiles * _ATTENTION_TILE * keys * clocks / (e.gpu.num_sms * e.attention_hz * busy)
    kernels = 3 if backward else 1  # row sums of dO·O, the gradients, the conversion of dQ
    moved = (
        bytes_of(dtype)
        * (2 if backward else 1)
        * b
        * head_dim
        * (2 * heads * s_q + 2 * kv_heads * s_kv)
    )
    return kernels * e.kernel_start_s + larger(compute, moved / e.stream_bytes_per_s)


def _clocks_per_score(
    e: Efficiency, kind: str, head_dim: Sizes, dtype: DType | str, backward: bool
) -> Sizes:
    """Clocks of one SM per query-key pair: 2 products forward, 5 backward, and what does not
    overlap with them."""
    curve = e.attention_curve(kind)
    head_dim = _padded(head_dim)
    ops = attainable.matmul_ops(e.gpu, matmul_key(dtype))
    if backward:
        return (
            10 * head_dim / min(curve.backward_share * ops, curve.backward_cap)
            + curve.backward_other
        )
    return 4 * head_dim / min(curve.share * ops, curve.cap) + curve.other


def _padded(head_dim: Sizes) -> Sizes:
    """The head size that a kernel computes with: the next of those it is built for."""
    padded: Sizes = _HEAD_SIZES[0]
    for smaller_size, size in pairwise(_HEAD_SIZES):
        padded = padded + (head_dim > smaller_size) * (size - smaller_size)
    return larger(padded, head_dim)


def _mean_keys(s_q: Sizes, s_kv: Sizes, causal: bool, window: Sizes | None) -> Sizes:
    """Keys that the tiles of queries visit on average, masked ones in partly masked tiles
    included."""
    if window is None:
        return s_kv - s_q / 2.0 + _ATTENTION_TILE / 2.0 if causal else s_kv * 1.0
    seen = smaller(window, s_kv)
    if not causal:
        return smaller(2.0 * seen, s_kv)
    # Query i of s sees min(i, w) keys: s·w - w²/2 in all where the sequence is square.
    return seen - seen * seen / (2.0 * s_kv) + _ATTENTION_TILE / 2.0


def _wave_share(tiles: Sizes, sms: int) -> Sizes:
    """Busy share of the SMs: half of the loss of whole waves, since tiles differ in length and SMs
    hold two."""
    waves = tiles / sms
    return waves / (0.5 * (waves + -(-tiles // sms)))


def _math_attention_s(
    batch: Sizes,
    s_q: Sizes,
    s_kv: Sizes,
    head_dim: Sizes,
    causal: bool,
    dtype: DType | str,
    backward: bool,
    e: Efficiency,
) -> Seconds:
    """Scores as a tensor: batched products, and passes over batch·s_q·s_kv elements for mask,
    softmax and their gradients."""
    scores = gemm_s(s_q, s_kv, head_dim, dtype, e, batch=batch)
    values = gemm_s(s_q, head_dim, s_kv, dtype, e, batch=batch)
    passes = 5 if backward else 4 if causal else 2
    softmax = elementwise_s(passes * bytes_of(dtype) * batch * s_q * s_kv, e, launches=passes // 2)
    return (2 if backward else 1) * (scores + values) + softmax
