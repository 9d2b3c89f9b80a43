"""FlashAttention against torch's FlashAttention-2, cuDNN and, where installed, flash-attn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from napkinmath_kernels import costs
from napkinmath_kernels.ops.flash_attention import flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_rows.timing import Case, Goal

SDPA, CUDNN = "sdpa flash", "sdpa cudnn"


def _sdpa(backend: SDPBackend) -> Callable[..., Any]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def _contestants(device: torch.device) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    found: dict[str, Callable[..., Any]] = {"napkinmath": lambda q, k, v: flash_attention(q, k, v, causal=True)}
    absent: dict[str, str] = {}
    if device.type == "cuda":
        found |= {SDPA: _sdpa(SDPBackend.FLASH_ATTENTION), CUDNN: _sdpa(SDPBackend.CUDNN_ATTENTION)}
    else:
        found[SDPA] = _sdpa(SDPBackend.FLASH_ATTENTION)
        absent[CUDNN] = "needs a GPU"
    try:
        from flash_attn import flash_attn_func

        found["flash-attn"] = lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    except ImportError:
        absent["flash-attn"] = "not installed"
    return found, absent


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Causal, 32 query and 8 K/V heads of 128, 16k tokens in all; forward and forward + backward."""
    shapes = [(1, 32, 4, 2, 64)] if tiny else [(8, 2048, 32, 8, 128), (2, 8192, 32, 8, 128), (1, 16384, 32, 8, 128), (4, 4096, 32, 8, 64)]
    found = []
    for batch, tokens, heads, kv_heads, size in shapes:
        cost = costs.flash_attention(batch, heads, kv_heads, tokens, tokens, size, "bf16", visible_share=0.5)
        contestants, absent = _contestants(device)
        shape = f"{batch}x{tokens} {heads}/{kv_heads} heads of {size}"

        def make(
            upstream: bool, batch: int = batch, tokens: int = tokens, heads: int = heads, kv_heads: int = kv_heads, size: int = size
        ) -> Any:
            new = lambda h: torch.randn(batch, tokens, h, size, device=device).bfloat16().transpose(1, 2)  # noqa: E731
            q, k, v = (new(h).requires_grad_(upstream) for h in (heads, kv_heads, kv_heads))
            return (q, k, v, new(heads)) if upstream else (q, k, v)

        forward = {name: (lambda inputs, f=f: f(*inputs)) for name, f in contestants.items()}
        both = {name: (lambda inputs, f=f: torch.autograd.grad(f(*inputs[:3]), inputs[:3], inputs[3])) for name, f in contestants.items()}
        num_bytes = batch * tokens * (heads + 2 * kv_heads) * size * 2
        goals = {SDPA: Goal(">= 1.05x FlashAttention-2", 1.05), CUDNN: Goal(">= 0.70x cuDNN", 0.70)}
        if "flash-attn" in contestants:
            goals["flash-attn"] = Goal(">= 1.05x flash-attn", 1.05)
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
        goals = {SDPA: Goal(">= 0.95x FlashAttention-2", 0.95), CUDNN: Goal(">= 0.60x cuDNN", 0.60)}
        if "flash-attn" in contestants:
            goals["flash-attn"] = Goal(">= 0.95x flash-attn", 0.95)
        flops = cost.forward_flops + cost.forward_flops * 5 // 2  # the customary count: the backward as five products
        found.append(Case("attention fwd+bwd", shape, lambda m=make: m(True), both, 2 * num_bytes, flops=flops, goals=goals, absent=absent))
    return found
