"""FlashAttention against torch's FlashAttention-2, cuDNN and, where installed, flash-attn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from napkinmath_kernels import costs
from napkinmath_kernels.ops.flash_attention import flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_rows.goals import (
    ATTENTION_BOTH,
    ATTENTION_FORWARD,
    ATTENTION_SHAPES,
    CUDNN,
    FLASH_ATTN,
    attention_name,
)
from kernel_rows.goals import FLASH_2 as SDPA
from kernel_rows.timing import Case


def _sdpa(backend: SDPBackend) -> Callable[..., Any]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    return call


def _contestants(device: torch.device) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    found: dict[str, Callable[..., Any]] = {
        "napkinmath": lambda q, k, v: flash_attention(q, k, v, causal=True)
    }
    absent: dict[str, str] = {}
    if device.type == "cuda":
        found |= {SDPA: _sdpa(SDPBackend.FLASH_ATTENTION), CUDNN: _sdpa(SDPBackend.CUDNN_ATTENTION)}
    else:
        found[SDPA] = _sdpa(SDPBackend.FLASH_ATTENTION)
        absent[CUDNN] = "needs a GPU"
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        found[FLASH_ATTN] = lambda q, k, v: flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), causal=True
        ).transpose(1, 2)
    except ImportError:
        absent[FLASH_ATTN] = "not installed"
    return found, absent


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Causal, 32 query and 8 K/V heads of 128, 16k tokens in all; forward and forward +
    backward."""
    shapes = [(1, 32, 4, 2, 64)] if tiny else ATTENTION_SHAPES
    found = []
    for batch, tokens, heads, kv_heads, size in shapes:
        cost = costs.flash_attention(
            batch, heads, kv_heads, tokens, tokens, size, "bf16", visible_share=0.5
        )
        contestants, absent = _contestants(device)
        shape = attention_name(batch, tokens, heads, kv_heads, size)

        def make(
            upstream: bool,
            batch: int = batch,
            tokens: int = tokens,
            heads: int = heads,
            kv_heads: int = kv_heads,
            size: int = size,
        ) -> Any:
            def new(h: int) -> torch.Tensor:
                shape = (batch, tokens, h, size)
                return torch.randn(*shape, device=device).bfloat16().transpose(1, 2)

            q, k, v = (new(h).requires_grad_(upstream) for h in (heads, kv_heads, kv_heads))
            return (q, k, v, new(heads)) if upstream else (q, k, v)

        forward = {name: lambda inputs, f=f: f(*inputs) for name, f in contestants.items()}
        both = {
            name: lambda inputs, f=f: torch.autograd.grad(f(*inputs[:3]), inputs[:3], inputs[3])
            for name, f in contestants.items()
        }
        num_bytes = batch * tokens * (heads + 2 * kv_heads) * size * 2
        skipped = {FLASH_ATTN} - contestants.keys()  # a goal only where it is installed
        goals = {
            against: goal for against, goal in ATTENTION_FORWARD.items() if against not in skipped
        }
        found.append(
            Case(
                "attention forward",
                shape,
                lambda m=make: m(False),
                forward,
                num_bytes,
                flops=cost.forward_flops,
                goals=goals,
                absent=absent,
            )
        )
        goals = {
            against: goal for against, goal in ATTENTION_BOTH.items() if against not in skipped
        }
        flops = (
            cost.forward_flops + cost.forward_flops * 5 // 2
        )  # the customary count: the backward as five products
        found.append(
            Case(
                "attention fwd+bwd",
                shape,
                lambda m=make: m(True),
                both,
                2 * num_bytes,
                flops=flops,
                goals=goals,
                absent=absent,
            )
        )
    return found
