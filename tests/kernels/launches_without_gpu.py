"""Compiles what a GPU's launches would compile, arguments specialised as Triton does it, for a
driver that is not there; launches nothing.

Triton makes an argument that is 1 a constant, marks those that 16 divides and takes numbers beyond
32 bits as 64: none of it happens in the interpreter, nor in the compile gate, where arguments are
named by type. Run in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
from typing import Any

import napkinmath_kernels.backend as backends
import torch
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.expert_linear import ExpertAdapter, expert_linear
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.nf4 import quantize
from napkinmath_kernels.ops.qlora import qlora_linear
from napkinmath_kernels.ops.rms_norm import rms_norm
from napkinmath_kernels.ops.rope import rope
from napkinmath_kernels.triton_kernels import flash_attention_launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
compiled: set[str] = set()


class NoDriver:
    """An H100's, as far as compiling asks."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    def call(*arguments: Any, **options: Any) -> None:
        assert all(
            0 < programs <= most for programs, most in zip(grid, MOST_PROGRAMS, strict=False)
        ), (kernel, grid)
        kernel.run(*arguments, grid=grid, warmup=True, **options)
        compiled.add(kernel.fn.__name__)

    return call


def backward(outputs: Any, *inputs: torch.Tensor) -> None:
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    torch.autograd.grad([out.float().sum() for out in outputs], inputs, allow_unused=True)


def new(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def smallest() -> None:
    """Everything at size one, where every length and count becomes a constant."""
    for hidden in (1, 600):
        x, weight = new(1, hidden), new(hidden)
        backward(rms_norm(x, weight), x, weight)
        backward(layer_norm(x, weight, weight), x, weight)
    x = new(1, 1)
    backward(swiglu(x, x), x)
    q = new(1, 1, 1, 2)
    backward(rope(q, q, torch.ones(1, 1, 2), torch.ones(1, 1, 2)), q)
    backward(
        linear_cross_entropy(
            x, new(1, 1), torch.zeros(1, dtype=torch.int64), softcap=1.0, label_smoothing=0.1
        ),
        x,
    )
    q = new(1, 1, 1, 64)
    backward(flash_attention(q, q, q, causal=True, window=1), q)
    wide = new(1, 1, 1, 128)
    backward(
        flash_attention(wide, wide, wide, causal=True), wide
    )  # tiles with a limit of registers
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    backward(flash_attention(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True), q)
    x, a, b = new(1, 64), new(1, 1, 64), new(1, 1, 1)
    ends, stack = torch.ones(1, dtype=torch.int32), torch.randn(1, 1, 64).bfloat16()
    backward(expert_linear(x, stack, ends, ExpertAdapter(a, b, 1.0)), x, a, b)
    x, a, b = new(1, 64), new(1, 64), new(1, 1)
    backward(qlora_linear(x, quantize(torch.randn(1, 64)), a, b, 1.0, dropout=0.1), x, a, b)


def many() -> None:
    """More heads times sequences than a grid's second dimension takes."""
    q = new(1, 2, 40_000, 64)
    bounds = torch.arange(40_001, dtype=torch.int32)
    backward(
        flash_attention(
            q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=1, max_seqlen_k=1
        ),
        q,
    )


def main() -> None:
    driver.set_active(NoDriver())
    assert not flash_attention_launch.is_interpreted()  # its tiles are those of a GPU
    backends.is_interpreted = lambda: (
        True
    )  # lets CPU tensors through to the launch, which sees no interpreter
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    with use_backend(Backend.TRITON):
        smallest()
        many()
    print(" ".join(sorted(compiled)))


if __name__ == "__main__":
    main()
