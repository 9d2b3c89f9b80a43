"""What a CPU runs where the meta device would decompose: so that a trace without storage is of the
same step that a CPU measures."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

aten = torch.ops.aten
FLASH_ON_CPU = 1  # sdp::SDPBackend::flash_attention, as _fused_sdp_choice answers


@contextmanager
def cpu_choices() -> Generator[None]:
    """Give the meta device a CPU's attention kernel, and its optimizers, inside the block."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            stack.enter_context(
                mock.patch(
                    f"{module}._get_fused_kernels_supported_devices", lambda: ["cpu", "meta"]
                )
            )
        stack.enter_context(
            mock.patch(
                "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
                lambda: ["meta"],
            )
        )
        yield


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernel that PyTorch itself picks for CPU tensors of these shapes (query (b,
    a, s, d))."""
    mask = None if attn_mask is None else torch.empty(attn_mask.shape, dtype=attn_mask.dtype)
    query_like, key_like, value_like = map(_like, (query, key, value))
    choice = aten._fused_sdp_choice(
        query_like,
        key_like,
        value_like,
        mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # attention.cpp: convert_boolean_attn_mask
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -math.inf)
    if choice == FLASH_ON_CPU:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
