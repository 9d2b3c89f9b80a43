"""The chunked losses of a frozen 128,256-token head: cross-entropy against eager logits, Liger and
cut-cross-entropy, labels' log-probabilities and a generalized JSD from a teacher against eager ones
and TRL's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from napkinmath_kernels import costs
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.divergence import linear_divergence
from napkinmath_kernels.ops.log_probabilities import linear_log_probabilities

from kernel_rows.goals import DIVERGENCE, EAGER, LIKELIHOODS, LOSS, LOSS_SHAPE, TRL, Goal, loss_name
from kernel_rows.timing import Case


def _eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), targets)


def _eager_likelihoods(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    every = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return every.gather(1, targets[:, None]).sum()


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward + backward to the hidden states, 8,192 tokens."""
    shape = (8, 16, 100) if tiny else LOSS_SHAPE
    _, hidden, vocabulary = shape
    weight = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).bfloat16()
    return [_cross_entropy(shape, weight), _likelihoods(shape, weight), _divergence(shape, weight)]


def _cross_entropy(shape: tuple[int, int, int], weight: torch.Tensor) -> Case:
    contestants: dict[str, Any] = {"napkinmath": linear_cross_entropy, EAGER: _eager}
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

    cost = costs.linear_cross_entropy(*shape, "bf16")
    return _case("linear cross-entropy", shape, weight, contestants, absent, cost, LOSS)


def _likelihoods(shape: tuple[int, int, int], weight: torch.Tensor) -> Case:
    contestants: dict[str, Any] = {
        "napkinmath": lambda h, w, t: linear_log_probabilities(h, w, t).log_probs.sum(),
        EAGER: _eager_likelihoods,
    }
    absent: dict[str, str] = {}
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Chunked

        contestants[TRL] = lambda h, w, t: Chunked.apply(h, w, None, t, 1.0, 32768)[0].sum()
    except ImportError:
        absent[TRL] = "trl is not installed"
    cost = costs.linear_log_probabilities(*shape, "bf16")
    return _case("log-probabilities", shape, weight, contestants, absent, cost, LIKELIHOODS)


def _divergence(shape: tuple[int, int, int], weight: torch.Tensor) -> Case:
    """Of a teacher of the same size, whose hidden states are the student's in another order."""
    taught_weight = weight.flip(0)

    def ours(h: torch.Tensor, w: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return linear_divergence(h, w, h.detach().flip(0), taught_weight, reduction="sum").loss

    def eager(h: torch.Tensor, w: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        rows = (h @ w.t(), h.detach().flip(0) @ taught_weight.t())
        own, taught = (torch.log_softmax(x.float(), -1) for x in rows)
        mixture = torch.logaddexp(own, taught) - math.log(2)
        pairs = ((taught, 0.5), (own, 0.5))
        return sum(  # type: ignore[return-value]
            share * F.kl_div(mixture, x, reduction="sum", log_target=True) for x, share in pairs
        )

    contestants: dict[str, Any] = {"napkinmath": ours, EAGER: eager}
    absent: dict[str, str] = {}
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Chunked

        contestants[TRL] = lambda h, w, t: Chunked.apply(
            h, w, None, h.detach().flip(0), taught_weight, None, 0.5
        )[0].sum()
    except ImportError:
        absent[TRL] = "trl is not installed, or has no chunked divergence"
    tokens, hidden, vocabulary = shape
    cost = costs.linear_divergence(tokens, hidden, hidden, vocabulary, "bf16")
    name = "divergence from a teacher"
    return _case(name, shape, weight, contestants, absent, cost, DIVERGENCE)


def _case(
    op: str,
    shape: tuple[int, int, int],
    weight: torch.Tensor,
    contestants: dict[str, Any],
    absent: dict[str, str],
    cost: costs.Cost,
    goals: dict[str, Goal],
) -> Case:
    tokens, hidden, vocabulary = shape

    def make() -> Any:
        h = torch.randn(tokens, hidden, device=weight.device).bfloat16().requires_grad_()
        return h, torch.randint(0, vocabulary, (tokens,), device=weight.device)

    calls = {
        name: lambda inputs, f=f: torch.autograd.grad(f(inputs[0], weight, inputs[1]), (inputs[0],))
        for name, f in contestants.items()
    }
    return Case(
        op,
        loss_name(*shape),
        make,
        calls,
        tokens * hidden * 2,
        flops=cost.forward_flops,
        goals=goals,
        absent=absent,
    )
