"""The chunked loss of a frozen 128,256-token head against eager logits, Liger and
cut-cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from napkinmath_kernels import costs
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy

from kernel_rows.goals import LOSS, LOSS_SHAPE, loss_name
from kernel_rows.timing import Case


def _eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), targets)


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward + backward to the hidden states, 8,192 tokens."""
    tokens, hidden, vocabulary = (8, 16, 100) if tiny else LOSS_SHAPE
    weight = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).bfloat16()
    contestants: dict[str, Any] = {"napkinmath": linear_cross_entropy, "eager": _eager}
    absent: dict[str, str] = {}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Liger,
        )

        contestants["liger"] = lambda h, w, t: Liger.apply(h, w, t)[0]
    except ImportError:
        absent["liger"] = "liger-kernel is not installed"
    try:
        from cut_cross_entropy import (  # type: ignore[import-not-found]
            linear_cross_entropy as cut,
        )

        contestants["cut-cross-entropy"] = lambda h, w, t: cut(h, w, t)
    except ImportError:
        absent["cut-cross-entropy"] = "not installed"

    def make() -> Any:
        h = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        return h, torch.randint(0, vocabulary, (tokens,), device=device)

    calls = {
        name: lambda inputs, f=f: torch.autograd.grad(f(inputs[0], weight, inputs[1]), (inputs[0],))
        for name, f in contestants.items()
    }
    cost = costs.linear_cross_entropy(tokens, hidden, vocabulary, "bf16")
    shape = loss_name(tokens, hidden, vocabulary)
    return [
        Case(
            "linear cross-entropy",
            shape,
            make,
            calls,
            tokens * hidden * 2,
            flops=cost.forward_flops,
            goals=LOSS,
            absent=absent,
        )
    ]
