"""What a CUDA build of PyTorch would choose where the meta device chooses otherwise, each as a named override.

Every override records that it was applied (``AppliedChoices.counts``), so that a report can list it with its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from napkinmath_profiler.tracing.cuda_autocast import meta_autocast

aten = torch.ops.aten


class AttentionBackend(str, Enum):
    """The kernel that ``scaled_dot_product_attention`` runs; ``AUTO`` asks the rules of CUDA's own choice."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class CudaChoice:
    """One override: its name, what CUDA does, and where that is written."""

    name: str
    what: str
    source: str


CHOICES: dict[str, CudaChoice] = {
    choice.name: choice
    for choice in (
        CudaChoice(
            "sdpa",
            "picks flash, efficient or math attention by dtype, mask, head size and GQA",
            "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
        ),
        CudaChoice("dropout", "one fused kernel that saves a bool mask", "aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable"),
        CudaChoice(
            "scalar answers",
            "asking a tensor for its value answers true, one or one",
            "transformers asks .all() of masks; optimizers ask .item() of steps",
        ),
        CudaChoice("foreach and fused optimizers", "CUDA tensors take the multi-tensor and fused paths", "torch/utils/_foreach_utils.py"),
        CudaChoice(
            "autocast", "casts by CUDA's op lists, with its cache of cast weights", "the installed torch/include/ATen/autocast_mode.h"
        ),
        CudaChoice(
            "bitsandbytes gemm_4bit",
            "dequantizes the whole weight and calls linear when there are many tokens",
            "bitsandbytes/backends/cuda/ops.py: gemm_4bit",
        ),
    )
}


@dataclass(slots=True)
class AppliedChoices:
    """How often each override acted in one trace, and which attention kernel was picked how often."""

    counts: Counter[str] = field(default_factory=Counter)
    attention: Counter[str] = field(default_factory=Counter)


def choose_attention(wanted: AttentionBackend, query: Any, key: Any, value: Any, mask: Any, enable_gqa: bool) -> AttentionBackend:
    """The backend CUDA picks on compute capability 8.0 and above: flash, then efficient, then math.

    A ``wanted`` backend is tried alone, with math as what is left when its constraints are not met.
    """
    auto = wanted is AttentionBackend.AUTO
    half = query.dtype in (torch.float16, torch.bfloat16)
    head_size = query.shape[-1]
    same_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
    flash_fits = half and mask is None and head_size <= 256 and head_size == value.shape[-1] and (same_heads or enable_gqa)
    if flash_fits and (auto or wanted is AttentionBackend.FLASH):
        return AttentionBackend.FLASH
    if wanted is AttentionBackend.CUDNN and half and head_size <= 128 and head_size % 8 == 0:
        return AttentionBackend.CUDNN
    if same_heads and (auto or wanted is AttentionBackend.EFFICIENT):
        return AttentionBackend.EFFICIENT
    return AttentionBackend.MATH


def _sdpa_function(backend: AttentionBackend, applied: AppliedChoices) -> Callable[..., torch.Tensor]:
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
        chosen = choose_attention(backend, query, key, value, attn_mask, enable_gqa)
        applied.counts["sdpa"] += 1
        applied.attention[chosen.value] += 1
        if attn_mask is not None and attn_mask.dtype == torch.bool and chosen is not AttentionBackend.MATH:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
        if chosen is AttentionBackend.FLASH:
            head_size = query.shape[-1]
            if head_size % 8:
                pad = 8 - head_size % 8
                query, key, value = (F.pad(x, (0, pad)) for x in (query, key, value))
                scale = head_size**-0.5 if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :head_size] if head_size % 8 else out
        needs_logsumexp = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if chosen is AttentionBackend.EFFICIENT:
            if attn_mask is not None:
                attn_mask = _aligned_bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, needs_logsumexp, dropout_p, is_causal, scale=scale
            )[0]
        if chosen is AttentionBackend.CUDNN:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, needs_logsumexp, dropout_p, is_causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return scaled_dot_product_attention


def _aligned_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The additive mask as the efficient kernel takes it: last dimension padded to a multiple of 16, then expanded."""
    last = mask.shape[-1]
    if last % 16:
        mask = F.pad(mask, (0, 16 - last % 16))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout_function(applied: AppliedChoices) -> Callable[..., torch.Tensor]:
    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or input.numel() == 0:
            return input
        if p == 1:
            return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
        applied.counts["dropout"] += 1
        return aten.native_dropout(input, p, train)[0]

    return dropout


def _scalar_answer(applied: AppliedChoices) -> Callable[..., Any]:
    def answer(tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if tensor.device.type != "meta":
            return func(*args, **kwargs)
        applied.counts["scalar answers"] += 1
        if tensor.dtype == torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1

    return answer


def _gemm_4bit(applied: AppliedChoices) -> Callable[..., Any]:
    bnb = torch.ops.bitsandbytes

    def gemm_4bit(tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a, b, weight_shape, absmax, blocksize, quant_type, *rest = args
        bias, absmax_8bit, absmax_code, absmax_offset = (
            (list(rest) + [None] * 4)[i] if i < len(rest) else kwargs.get(name)
            for i, name in enumerate(("bias", "absmax_8bit", "absmax_code", "absmax_offset"))
        )
        if a.numel() // a.shape[-1] <= SMALL_GEMM_TOKENS:
            return func(*args, **kwargs)
        applied.counts["bitsandbytes gemm_4bit"] += 1
        with tracker:
            if absmax_8bit is not None:
                dequantized = torch.empty_like(absmax_8bit, dtype=torch.float32)
                absmax = dequantized + absmax_offset
            weight = bnb.dequantize_4bit.default(b, absmax, blocksize, quant_type, weight_shape, a.dtype)
            return F.linear(a, weight, bias)

    return gemm_4bit


SMALL_GEMM_TOKENS = 1536  # bitsandbytes/backends/cuda/ops.py: _gemm_4bit_custom_max_m; fewer tokens depend on the GPU


def handlers(applied: AppliedChoices) -> dict[Any, Any]:
    """Op overload -> what the tracker runs in its place under CUDA's choices."""
    table: dict[Any, Any] = {aten._local_scalar_dense.default: _scalar_answer(applied)}
    if hasattr(torch.ops, "bitsandbytes") and hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        table[torch.ops.bitsandbytes.gemm_4bit.default] = _gemm_4bit(applied)
    return table


@contextmanager
def cuda_choices(backend: AttentionBackend, applied: AppliedChoices) -> Iterator[None]:
    """Give the meta device CUDA's choices inside the block, recompute during backward included.

    Registered below autograd at the dispatcher (``AutogradMeta``) because a function mode is off while backward runs.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _sdpa_function(backend, applied), "AutogradMeta")
    library.impl("dropout", _dropout_function(applied), "AutogradMeta")
    with ExitStack() as stack:
        autocast = stack.enter_context(meta_autocast())
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
                stack.enter_context(mock.patch(f"{module}.{name}", lambda: ["cuda", "meta"]))
        try:
            yield
        finally:
            library._destroy()
            applied.counts["autocast"] += autocast.num_casting_calls
