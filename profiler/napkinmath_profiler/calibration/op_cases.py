"""Operations to time: how to make their inputs, what they compute and move, and what the time model
says of them.

A case holds no tensors: `make` allocates one set of inputs on a device and returns the call, so
that sets can be rotated and freed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.cuda.nccl as nccl
import torch.nn.functional as F
from napkinmath.base.units import format_bytes
from napkinmath.timing import efficiency
from napkinmath.timing.attention import attention_s
from napkinmath.timing.efficiency import Efficiency
from torch.nn.attention import SDPBackend, sdpa_kernel

from napkinmath_profiler.calibration.devices import Device

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class OpCase:
    """One operation at one size. `moved` counts bytes read and written, `held` those of one set of
    inputs and outputs."""

    op: str
    arguments: dict[str, Any]
    make: Callable[[Device], Call]
    predict: Callable[[Efficiency], float] | None
    flops: int = 0
    moved: int = 0
    held: int = 0
    needs_cuda: bool = False

    @property
    def label(self) -> str:
        """The size in words, for a table."""
        return _LABELS[self.op](self.arguments)


_LABELS: dict[str, Callable[[dict[str, Any]], str]] = {
    "copy": lambda a: format_bytes(a["nbytes"]),
    "elementwise": lambda a: f"{a['kind']} {a['rows']} x {a['columns']}",
    "gemm": lambda a: f"{a['dtype']} {_batched(a)}{a['m']}x{a['n']}x{a['k']}",
    "attention": lambda a: (
        f"{a['kernel']}"
        f" {a['rows']}x{a['heads']}x{a['length']}x{a['head_dim']}{' back' if a['backward'] else ''}"
    ),
    "launch": lambda a: f"{a['count']} kernels, {a['how']}",
    "adamw": lambda a: f"{a['flavour']}, {a['count'] / 1e6:.3g}M numbers",
    "host copy": lambda a: f"{a['memory']} {a['direction']} {format_bytes(a['nbytes'])}",
    "dequantize": lambda a: f"nf4 {a['rows']} x {a['columns']} {a['provider']}",
    "gpu link": lambda a: f"{a['operation']} {format_bytes(a['nbytes'])}",
}


def _batched(arguments: dict[str, Any]) -> str:
    return f"{arguments['batch']} of " if "batch" in arguments else ""


def copy(nbytes: int) -> OpCase:
    """A copy of ``nbytes`` from one tensor to another."""

    def make(device: Device) -> Call:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return OpCase(
        "copy",
        {"nbytes": nbytes},
        make,
        lambda e: efficiency.elementwise_s(2 * nbytes, e, fused=True),
        moved=2 * nbytes,
        held=2 * nbytes,
    )


def _random(device: Device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device.torch_device).to(dtype)


# Kind -> bytes read and written a number of bf16 (an addition's operands are one tensor), the call.
ELEMENTWISE: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cast": (6, lambda x: x.to(torch.float32)),
    "add": (4, lambda x: x + x),
    "silu": (4, F.silu),
    "softmax": (4, lambda x: torch.softmax(x, -1)),
}


def elementwise(kind: str, rows: int, columns: int) -> OpCase:
    """One of torch's pointwise or reducing kernels on bf16 of (rows, columns): cast, add, silu,
    softmax."""
    count = rows * columns
    bytes_each, run = ELEMENTWISE[kind]
    moved = bytes_each * count

    def make(device: Device) -> Call:
        return partial(run, _random(device, rows, columns))

    return OpCase(
        "elementwise",
        {"kind": kind, "rows": rows, "columns": columns},
        make,
        lambda e: efficiency.elementwise_s(moved, e),
        moved=moved,
        held=8 * count,
    )


def gemm(m: int, n: int, k: int, dtype: str, batch: int = 1) -> OpCase:
    """``batch`` products (m x k)·(k x n), as a linear layer does them."""
    size = DTYPES[dtype].itemsize
    moved = size * batch * (m * k + k * n + m * n)

    def make(device: Device) -> Call:
        if batch == 1:
            x, w = (_random(device, rows, k, dtype=DTYPES[dtype]) for rows in (m, n))
            return _in_tf32(lambda: F.linear(x, w)) if dtype == "tf32" else lambda: F.linear(x, w)
        a, b = (_random(device, batch, *of, dtype=DTYPES[dtype]) for of in ((m, k), (k, n)))
        return lambda: torch.bmm(a, b)

    arguments = {"dtype": dtype, "m": m, "n": n, "k": k, **({"batch": batch} if batch > 1 else {})}
    return OpCase(
        "gemm",
        arguments,
        make,
        lambda e: efficiency.gemm_s(m, n, k, dtype, e, batch=batch),
        flops=2 * batch * m * n * k,
        moved=moved,
        held=moved,
    )


def _in_tf32(call: Call) -> Call:
    """The call with fp32 products in TF32, as `torch.set_float32_matmul_precision("high")` has
    them."""

    def run() -> object:
        torch.set_float32_matmul_precision("high")
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision("highest")

    return run


def attention(
    kernel: str,
    rows: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    *,
    causal: bool,
    backward: bool,
) -> OpCase:
    """Scaled dot-product attention in bf16 by one kernel; the backward is timed alone."""
    scores = 4 * rows * heads * length * length * head_dim // (2 if causal else 1)
    moved = (2 if backward else 1) * 2 * rows * length * head_dim * (2 * heads + 2 * kv_heads)

    def make(device: Device) -> Call:
        shapes = [(rows, count, length, head_dim) for count in (heads, kv_heads, kv_heads)]
        return _attention_call(kernel, shapes, device, causal=causal, backward=backward)

    def predict(e: Efficiency) -> float:
        sizes = (rows, heads, kv_heads, length, length, head_dim)
        return attention_s(kernel, *sizes, causal, None, "bf16", backward, e)

    arguments = {
        "kernel": kernel,
        "rows": rows,
        "heads": heads,
        "length": length,
        "head_dim": head_dim,
        "causal": causal,
        "backward": backward,
    }
    flops = 5 * scores // 2 if backward else scores
    return OpCase("attention", arguments, make, predict, flops, moved, held=4 * moved)


def _attention_call(
    kernel: str, shapes: list[tuple[int, ...]], device: Device, *, causal: bool, backward: bool
) -> Call:
    q, k, v = (_random(device, *shape).requires_grad_(backward) for shape in shapes)
    grouped = shapes[0] != shapes[1]

    def forward() -> torch.Tensor:
        with _only(kernel, device):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    if not backward:
        return forward
    out = forward()
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _only(kernel: str, device: Device) -> Any:

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    return sdpa_kernel(backends[kernel]) if device.is_cuda else nullcontext()


def launches(*, graphed: bool) -> OpCase:
    """A hundred additions to one number: issued one by one, or replayed from a CUDA graph, which
    leaves the device's own start."""
    count = 100

    def make(device: Device) -> Call:
        x = torch.zeros(1, device=device.torch_device)

        def run() -> None:
            for _ in range(count):
                x.add_(1.0)

        return _graphed(run) if graphed else run

    arguments = {"how": "graph" if graphed else "eager", "count": count}
    return OpCase("launch", arguments, make, None, held=512, needs_cuda=graphed)


def _graphed(run: Call) -> Call:
    """The replay of what was captured from ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


ADAMW_FLAGS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


def adamw(count: int, flavour: str) -> OpCase:
    """One AdamW step over ``count`` fp32 parameters in sixteen tensors."""
    moved = 7 * 4 * count

    def make(device: Device) -> Call:
        parameters = [
            torch.zeros(count // 16, device=device.torch_device, requires_grad=True)
            for _ in range(16)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW(parameters, lr=1e-6, **ADAMW_FLAGS[flavour]).step

    def predict(e: Efficiency) -> float:
        return efficiency.elementwise_s(moved, e, launches=4, fused=True)

    arguments = {"flavour": flavour, "count": count}
    known = predict if flavour == "fused" else None
    return OpCase("adamw", arguments, make, known, moved=moved, held=4 * 4 * count)


def host_copy(nbytes: int, *, to_host: bool, pinned: bool) -> OpCase:
    """A copy between host and GPU."""

    def make(device: Device) -> Call:
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        target, source = (host, there) if to_host else (there, host)
        return lambda: target.copy_(source, non_blocking=pinned)

    direction = "to host" if to_host else "to device"
    memory = "pinned" if pinned else "pageable"
    return OpCase(
        "host copy",
        {"nbytes": nbytes, "direction": direction, "memory": memory},
        make,
        lambda e: efficiency.host_copy_s(nbytes, pinned, e),
        moved=nbytes,
        held=nbytes,
        needs_cuda=True,
    )


def dequantize(rows: int, columns: int, provider: str) -> OpCase:
    """NF4 weights of (rows, columns) with double quantization expanded to bf16, by bitsandbytes or
    by our kernels."""
    count = rows * columns
    moved = count // 2 + 2 * count + count // 64

    def make(device: Device) -> Call:
        weights = _random(device, rows, columns)
        return _our_expansion(weights) if provider == "napkinmath" else _their_expansion(weights)

    def predict(e: Efficiency) -> float:
        return efficiency.dequantize_nf4_s(count, e)

    return OpCase(
        "dequantize",
        {"provider": provider, "rows": rows, "columns": columns},
        make,
        predict if provider == "bitsandbytes" else None,
        moved=moved,
        held=moved + 2 * count,
    )


def _our_expansion(weights: torch.Tensor) -> Call:
    from napkinmath_kernels import dequantize, quantize

    return partial(dequantize, quantize(weights))


def _their_expansion(weights: torch.Tensor) -> Call:
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    return partial(bnb.dequantize_4bit, packed, state)


def between_gpus(nbytes: int, operation: str) -> OpCase:
    """NCCL over every visible GPU from one process, or a copy to the next one."""

    def make(device: Device) -> Call:
        others = [
            torch.zeros(nbytes // 4, device=f"cuda:{number}")
            for number in range(torch.cuda.device_count())
        ]
        if operation == "peer copy":
            return lambda: others[1].copy_(others[0], non_blocking=True)

        return lambda: nccl.all_reduce(others)

    return OpCase(
        "gpu link",
        {"operation": operation, "nbytes": nbytes},
        make,
        None,
        moved=nbytes,
        held=nbytes,
        needs_cuda=True,
    )
