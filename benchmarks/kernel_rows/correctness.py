"""A look at each kernel's error against float64 on the device before anything is timed: a fast wrong kernel is no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.rms_norm import rms_norm

from kernel_rows.timing import Rows

#: bf16 results of sums over up to 128 terms; the tests hold the kernels to twice plain torch's error, this only catches breakage.
LIMIT = 2e-2


def _errors(function: Callable[..., Any], inputs: list[torch.Tensor]) -> float:
    """Largest relative error of outputs and gradients against the reference path in float64."""
    found = []
    for dtype, backend in ((torch.bfloat16, None), (torch.float64, Backend.REFERENCE)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        if backend is None:
            outputs = function(*leaves)
            results = [outputs, *torch.autograd.grad(outputs.float().square().sum(), leaves)]
        else:
            with use_backend(backend):
                outputs = function(*leaves)
                results = [outputs, *torch.autograd.grad(outputs.square().sum(), leaves)]
        found.append([x.detach().double().cpu() for x in results])
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(*found, strict=True))


def check(rows: Rows, device: torch.device) -> bool:
    """A row for each kernel; False if one is wrong."""
    on_device = lambda *shape: torch.randn(*shape, device=device).bfloat16().double()  # noqa: E731
    targets = torch.randint(0, 1000, (33,), device=device)
    checks: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
        "rms_norm": (rms_norm, [on_device(33, 512), on_device(512)]),
        "layer_norm": (layer_norm, [on_device(33, 512), on_device(512), on_device(512)]),
        "swiglu": (swiglu, [on_device(33, 512), on_device(33, 512)]),
        "linear cross-entropy": (lambda h, w: linear_cross_entropy(h, w, targets), [on_device(33, 64), on_device(1000, 64) / 8]),
        "attention": (
            lambda q, k, v: flash_attention(q, k, v, causal=True),
            [on_device(1, 4, 130, 64), on_device(1, 2, 130, 64), on_device(1, 2, 130, 64)],
        ),
    }
    right = True
    for op, (function, inputs) in checks.items():
        try:
            error = _errors(function, inputs)
            status = "right" if error < LIMIT else "wrong"
            rows.add(op=op, shape="check", contestant="napkinmath", status=status, relative_error=error)
        except Exception as failure:
            status = "failed"
            rows.add(op=op, shape="check", contestant="napkinmath", status=status, reason=f"{type(failure).__name__}: {failure}"[:300])
        right &= status == "right"
    return right
