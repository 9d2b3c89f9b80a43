"""A look at each kernel's error against float64 on the device before anything is timed: a fast
wrong kernel is no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.eight_bit import quantize_8bit
from napkinmath_kernels.ops.expert_linear import ExpertAdapter, expert_linear
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.linear_group import FrozenLinear, LoraAdapter
from napkinmath_kernels.ops.nf4 import QuantizedWeight, dequantize, quantize
from napkinmath_kernels.ops.qlora import qlora_linears
from napkinmath_kernels.ops.qlora_mlp import qlora_mlp
from napkinmath_kernels.ops.rms_norm import rms_norm
from napkinmath_kernels.ops.rope import rope
from napkinmath_kernels.ops.stored_weight import StoredWeight

from kernel_rows.goals import LOST
from kernel_rows.lost_context import ContextLost, is_lost
from kernel_rows.timing import Clock, Rows

# : bf16 results of sums over up to 128 terms; the tests hold the kernels to twice plain torch's
# error, this only catches breakage.
LIMIT = 2e-2
VOCABULARY = 9000  # a whole block of the loss's kernel, and a part of one


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
    return max(
        ((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(*found, strict=True)
    )


def _qlora(weights: list[QuantizedWeight]) -> Callable[..., torch.Tensor]:
    """Q, K and V of x, then an MLP of it, with an adapter on each."""

    def call(x: torch.Tensor, *adapters: torch.Tensor) -> torch.Tensor:
        linears = [
            FrozenLinear(weight, None, LoraAdapter(a, b, 2.0))
            for weight, a, b in zip(weights, adapters[::2], adapters[1::2], strict=True)
        ]
        return sum(qlora_linears(x, linears[:3])) + qlora_mlp(x, *linears)  # type: ignore[return-value]

    return call


def _decoded_alike(weight: StoredWeight) -> float:
    """0 if the kernel decodes what the reference path does, bit for bit, else the largest
    difference."""
    with use_backend(Backend.REFERENCE):
        expected = dequantize(weight)
    return (dequantize(weight).float() - expected.float()).abs().max().item()


def check(rows: Rows, clock: Clock) -> bool:
    """A row for each kernel; False if one is wrong. One that breaks the GPU's context ends the
    process (ContextLost), and is left out by the next."""
    broken = {row["op"] for row in rows.rows if (row["shape"], row["status"]) == ("check", LOST)}
    right = not broken
    for op, measure in _checks(clock.device).items():
        if op in broken:
            continue
        found: dict[str, Any] = {"op": op, "shape": "check", "contestant": "napkinmath"}
        try:
            error = measure()
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"[:300]
            lost = is_lost(clock.device)
            rows.add(**found, status=LOST if lost else "failed", reason=reason)
            if lost:
                raise ContextLost(f"{op}, the check of its numbers") from None
            right = False
            continue
        is_right = error < LIMIT
        rows.add(**found, status="right" if is_right else "wrong", relative_error=error)
        right &= is_right
    return right


def _checks(device: torch.device) -> dict[str, Callable[[], float]]:
    """The error of each kernel, to be measured."""
    on_device = lambda *shape: torch.randn(*shape, device=device).bfloat16().double()  # noqa: E731
    targets = torch.randint(0, VOCABULARY, (33,), device=device)
    checks: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
        "rms_norm": (rms_norm, [on_device(33, 512), on_device(512)]),
        "layer_norm": (layer_norm, [on_device(33, 512), on_device(512), on_device(512)]),
        "swiglu": (swiglu, [on_device(33, 512), on_device(33, 512)]),
        "linear cross-entropy": (
            lambda h, w: linear_cross_entropy(h, w, targets),
            [on_device(33, 64), on_device(VOCABULARY, 64) / 8],
        ),
        "attention": (
            lambda q, k, v: flash_attention(q, k, v, causal=True),
            [on_device(1, 4, 130, 64), on_device(1, 2, 130, 64), on_device(1, 2, 130, 64)],
        ),
    }
    cos, sin = (
        (torch.rand(1, 33, 64, device=device) * 6).cos(),
        (torch.rand(1, 33, 64, device=device) * 6).sin(),
    )
    checks["rope"] = (
        lambda q, k: torch.cat(rope(q, k, cos, sin), 1),
        [on_device(2, 4, 33, 64), on_device(2, 2, 33, 64)],
    )
    weights = [quantize((torch.randn(128, 128, device=device) / 12).bfloat16()) for _ in range(3)]
    adapters = [on_device(*shape) / 12 for _ in weights for shape in ((8, 128), (128, 8))]
    checks["qlora"] = (_qlora(weights), [on_device(33, 128), *adapters])
    stack = quantize((torch.randn(3, 128, 128, device=device) / 12).bfloat16())
    ends = torch.tensor([20, 20, 33], dtype=torch.int32, device=device)
    factors = [on_device(3, 8, 128) / 12, on_device(3, 128, 8) / 12]
    checks["expert linear"] = (
        lambda x, a, b: expert_linear(x, stack, ends, ExpertAdapter(a, b, 2.0)),
        [on_device(33, 128), *factors],
    )
    measured: dict[str, Callable[[], float]] = {
        op: lambda made=made: _errors(*made) for op, made in checks.items()
    }
    measured["fp8 dequantize"] = lambda: _decoded_alike(
        quantize_8bit(torch.randn(200, 1000, device=device).bfloat16())
    )
    measured["nf4 dequantize"] = lambda: _decoded_alike(
        quantize(torch.randn(192, 1024, device=device).bfloat16())
    )
    return measured
