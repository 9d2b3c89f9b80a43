"""Which kernel CUDA's ``scaled_dot_product_attention`` runs, and the calls around it, for meta
tensors.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (``can_use_*_attention``,
``priority_order``) and aten/src/ATen/native/transformers/attention.cpp (padding and masks) of
PyTorch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

aten = torch.ops.aten
SDPA_HEADER = "ATen/native/transformers/sdp_utils_cpp.h"
MAX_FLASH_HEAD_SIZE = 256
MAX_CUDNN_HEAD_SIZE, MAX_CUDNN_HEAD_SIZE_ON_HOPPER = 128, 256
EFFICIENT_MASK_ALIGNMENT = 8


class AttentionBackend(str, Enum):
    """The kernel that ``scaled_dot_product_attention`` runs; ``AUTO`` is what CUDA would choose."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the choice depends on."""

    dtype: torch.dtype
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    has_mask: bool
    is_causal: bool
    enable_gqa: bool
    dropout_p: float
    needs_grad: bool

    @property
    def same_heads(self) -> bool:
        """Whether queries, keys and values have as many heads as one another."""
        return self.query_shape[-3] == self.key_shape[-3] == self.value_shape[-3]

    @property
    def is_half(self) -> bool:
        """16-bit floating point."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Head size of queries, keys and values."""
        return self.query_shape[-1], self.key_shape[-1], self.value_shape[-1]


@cache
def efficient_supports_gqa() -> bool:
    """Whether the installed PyTorch's memory-efficient kernel takes grouped heads (its headers then
    name ``supports_mqa``)."""
    header = Path(torch.__file__).parent / "include" / SDPA_HEADER
    return header.exists() and "supports_mqa" in header.read_text()


def flash_fits(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """``can_use_flash_attention`` for dense tensors."""
    query, key, value = call.head_sizes
    if (
        capability < (8, 0)
        or not call.is_half
        or call.has_mask
        or not query == key == value
        or query > MAX_FLASH_HEAD_SIZE
    ):
        return False
    if call.is_causal and call.query_shape[-2] != call.key_shape[-2]:
        return False
    if (call.needs_grad and (8, 6) <= capability <= (8, 9)) or (12, 0) <= capability <= (12, 1):
        fits = query <= 192 or (call.dropout_p == 0 and query > 224)
        if not fits:
            return False
    return call.same_heads or call.enable_gqa


def efficient_fits(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """``can_use_mem_efficient_attention`` for dense tensors."""
    if call.dtype == torch.bfloat16 and capability < (8, 0):
        return False
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    query, key, value = call.head_sizes
    uses_tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and call.is_half)
    alignment = 4 if capability >= (8, 0) else 1
    if uses_tensor_cores:
        alignment = max(alignment, 8 if call.is_half else 4)
    if query != key or query % alignment or value % alignment:
        return False
    return call.same_heads or (call.enable_gqa and efficient_supports_gqa())


def cudnn_fits(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """``can_use_cudnn_attention`` for dense tensors, with cuDNN 9.10 or later."""
    query, key, value = call.head_sizes
    hopper = capability == (9, 0)
    most = MAX_CUDNN_HEAD_SIZE_ON_HOPPER if hopper else MAX_CUDNN_HEAD_SIZE
    small = max(query, value) <= most and query % 8 == 0 and value % 8 == 0
    dropout_fits = call.dropout_p * 16 == int(call.dropout_p * 16)
    return (
        capability >= (8, 0)
        and call.is_half
        and small
        and query == key
        and dropout_fits
        and (call.same_heads or call.enable_gqa)
    )


FITS: dict[AttentionBackend, Callable[[AttentionCall, tuple[int, int]], bool]] = {
    AttentionBackend.CUDNN: cudnn_fits,
    AttentionBackend.FLASH: flash_fits,
    AttentionBackend.EFFICIENT: efficient_fits,
}


def choose_attention(
    wanted: AttentionBackend, call: AttentionCall, capability: tuple[int, int]
) -> AttentionBackend:
    """The backend for one call: CUDA's order of preference, or ``wanted`` alone, with math when
    nothing fits.

    On compute capability 9.x and 10.x PyTorch with cuDNN above 9.15 asks cuDNN first.
    """
    if wanted is AttentionBackend.AUTO:
        order = [AttentionBackend.FLASH, AttentionBackend.EFFICIENT]
        if capability[0] in (9, 10):
            order.insert(0, AttentionBackend.CUDNN)
    else:
        order = [wanted] if wanted in FITS else []
    return next(
        (backend for backend in order if FITS[backend](call, capability)), AttentionBackend.MATH
    )


def sdpa_function(
    wanted: AttentionBackend, capability: tuple[int, int], chosen: Counter[str]
) -> Callable[..., torch.Tensor]:
    """A replacement of ``aten::scaled_dot_product_attention`` that makes CUDA's choice and counts
    it in ``chosen``."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        call = AttentionCall(
            query.dtype,
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            attn_mask is not None,
            is_causal,
            enable_gqa,
            dropout_p,
            needs_grad,
        )
        backend = choose_attention(wanted, call, capability)
        chosen[backend.value] += 1
        if attn_mask is not None and backend is not AttentionBackend.MATH:
            attn_mask = _additive(attn_mask, query.dtype)
        if backend is AttentionBackend.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if backend is AttentionBackend.EFFICIENT:
            mask = _aligned_mask(attn_mask, query, key) if attn_mask is not None else None
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
            )[0]
        if backend is AttentionBackend.CUDNN:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, needs_grad, dropout_p, is_causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]

    return scaled_dot_product_attention


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``convert_boolean_attn_mask``: a boolean mask as zeros and minus infinities."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Flash with the head size padded to a multiple of 8, as ``scaled_dot_product_attention`` pads
    it on CUDA."""
    head_size = q.shape[-1]
    if head_size % 8 == 0:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    pad = 8 - head_size % 8
    q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    scale = head_size**-0.5 if scale is None else scale
    return aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p, is_causal, False, scale=scale
    )[0][..., :head_size]


def _aligned_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The additive mask as the efficient kernel takes it (preprocess_mask): where a stride but the
    last is no multiple of 8, a padded copy of which a slice is read; then expanded."""
    aligned = all(stride % EFFICIENT_MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1])
    if not aligned or mask.stride(-1) != 1:
        last = mask.shape[-1]
        padding = EFFICIENT_MASK_ALIGNMENT - last % EFFICIENT_MASK_ALIGNMENT
        mask = F.pad(mask, (0, padding))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
