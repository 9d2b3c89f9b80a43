"""Which operations to time on a device: its ceilings, the shapes of ordinary layers, and those of a
model at hand."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from napkinmath.base.expr import Bindings
from napkinmath.estimate import Estimate
from napkinmath.ir.costs import AttentionCost, Gemm
from napkinmath.ir.ledger import RUN, Work

from napkinmath_profiler.calibration import op_cases
from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.op_cases import OpCase

MOST_MODEL_OPS = 10
_LAYER_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (1024, 4096))
_CPU_PRODUCTS = ((64, 64, 64), (64, 256, 256), (256, 768, 256), (512, 256, 768), (512, 512, 512))


def planned(device: Device, model: Estimate | None = None) -> list[OpCase]:
    """The cases in order of worth: where time runs out, what is first has been measured."""
    cases = list(_on_gpu(device) if device.is_cuda else _on_cpu())
    return [*cases[:4], *(model_ops(model) if model is not None else []), *cases[4:]]


def _on_gpu(device: Device) -> Iterator[OpCase]:
    yield op_cases.copy(1 << 28)
    yield op_cases.gemm(8192, 8192, 8192, "bf16")
    yield op_cases.launches(graphed=True)
    yield op_cases.launches(graphed=False)
    for nbytes in (1 << 16, 1 << 20, 1 << 23, 1 << 25):
        yield op_cases.copy(nbytes)
    for tokens in (512, 2048, 8192):
        for n, k in _LAYER_SHAPES:
            yield op_cases.gemm(tokens, n, k, "bf16")
    for kind in ("cast", "add", "silu", "softmax"):
        for rows in (1024, 8192):
            yield op_cases.elementwise(kind, rows, 4096)
    yield from _attention(device)
    for dtype in ("fp16", "tf32", "fp32"):
        yield op_cases.gemm(4096, 4096, 4096, dtype)
    yield op_cases.gemm(256, 1024, 1024, "bf16")
    yield op_cases.gemm(4096, 4097, 4096, "bf16")
    yield from _host_copies()
    yield from _dequantize(((4096, 4096), (11008, 4096)))
    for flavour in ("fused", "foreach"):
        yield op_cases.adamw(1 << 26, flavour)
    if torch.cuda.device_count() > 1:
        yield from _between_gpus()


def _host_copies() -> Iterator[OpCase]:
    for to_host in (False, True):
        for pinned in (True, False):
            for nbytes in (1 << 20, 1 << 27):
                yield op_cases.host_copy(nbytes, to_host=to_host, pinned=pinned)


def _between_gpus() -> Iterator[OpCase]:
    for operation in ("peer copy", "all-reduce"):
        for nbytes in (1 << 20, 1 << 28):
            yield op_cases.between_gpus(nbytes, operation)


def _attention(device: Device) -> Iterator[OpCase]:
    major = torch.cuda.get_device_capability(device.torch_device)[0] if device.is_cuda else 8
    kernels = ["flash", "efficient"] if major >= 8 else ["efficient"]
    for kernel in [*kernels, *(["cudnn"] if major >= 9 else [])]:
        for length, head_dim in ((2048, 128), (8192, 128), (2048, 64), (512, 128)):
            for backward in (False, True):
                yield op_cases.attention(
                    kernel,
                    max(1, 4096 // length),
                    32,
                    32,
                    length,
                    head_dim,
                    causal=True,
                    backward=backward,
                )


def _on_cpu() -> Iterator[OpCase]:
    """The same kinds at sizes that a core does in milliseconds."""
    yield op_cases.copy(1 << 25)
    yield op_cases.gemm(384, 384, 384, "fp32")
    yield op_cases.launches(graphed=False)
    yield op_cases.gemm(256, 256, 256, "bf16")
    for nbytes in (1 << 16, 1 << 20, 1 << 23):
        yield op_cases.copy(nbytes)
    for m, n, k in _CPU_PRODUCTS:
        yield op_cases.gemm(m, n, k, "fp32")
    for kind in ("cast", "add", "silu", "softmax"):
        for rows in (64, 1024):
            yield op_cases.elementwise(kind, rows, 512)
    for length in (64, 256, 512):
        for backward in (False, True):
            yield op_cases.attention("flash", 1, 4, 4, length, 64, causal=True, backward=backward)
    yield from _dequantize(((256, 256), (512, 1024)))
    yield op_cases.adamw(1 << 20, "fused")
    yield op_cases.adamw(1 << 20, "loop")


def _dequantize(shapes: tuple[tuple[int, int], ...]) -> Iterator[OpCase]:
    for provider in ("bitsandbytes", "napkinmath"):
        if find_spec(provider if provider == "bitsandbytes" else "napkinmath_kernels") is not None:
            for rows, columns in shapes:
                yield op_cases.dequantize(rows, columns, provider)


def model_ops(model: Estimate) -> list[OpCase]:
    """The matrix products and attention calls of a model's step that take most of it, from the
    estimator's own ledger."""
    weights: dict[str, tuple[float, OpCase]] = {}
    top = Bindings(model.step.symbols)
    for _, segments in model.step.micro_steps:
        for segment in segments:
            bind = top.extended(dict(segment.symbols))
            for action, payload in segment.events:
                if action == RUN and isinstance(payload, Work):
                    for cost in payload.costs:
                        case = _case_of(cost, bind, str(model.step.policy.rule.gemm or ""))
                        if case is not None:
                            known = weights.get(repr(case.arguments), (0.0, case))[0]
                            weights[repr(case.arguments)] = (
                                known + segment.repeat * bind(cost.flops),
                                case,
                            )
    found = sorted(weights.values(), key=lambda item: -item[0])
    return [case for _, case in found[:MOST_MODEL_OPS]]


def _case_of(cost: object, bind: Bindings, rule: str) -> OpCase | None:
    if isinstance(cost, Gemm):
        dtype = rule or str(cost.dtype)
        if dtype not in op_cases.DTYPES:
            return None
        return op_cases.gemm(bind(cost.m), bind(cost.n), bind(cost.k), dtype, bind(cost.batch))
    if (
        isinstance(cost, AttentionCost)
        and cost.kernel in ("flash", "efficient", "cudnn")
        and cost.window is None
    ):
        if bind(cost.s_kv) != bind(cost.s_q):
            return None
        sizes = map(bind, (cost.rows, cost.heads, cost.kv_heads, cost.s_q, cost.head_dim))
        return op_cases.attention(cost.kernel, *sizes, causal=cost.causal, backward=cost.backward)
    return None
