"""Triton kernels of gated activations: y = act(gate) * up, and the backward that also hands back
y."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rows import as_rows
from .launch import Shipped, cdiv, launch, next_power_of_2

BLOCK = 2048
NUM_WARPS = 8  # 8 values a thread: one 16-byte access of bf16

SILU: tl.constexpr = tl.constexpr(0)
GELU_TANH: tl.constexpr = tl.constexpr(1)


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """(act(x), act'(x)) in fp32: SiLU, GELU by its tanh approximation, or GELU by erf."""
    if KIND == SILU:
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == GELU_TANH:
        inner = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        sigmoid = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2, without tanh's cancellation
        value = x * sigmoid
        complement = tl.sigmoid(
            -2.0 * inner
        )  # 1 - sigmoid would cancel where the sigmoid saturates
        slope = sigmoid + 2.0 * x * sigmoid * complement * 0.7978845608028654 * (
            1.0 + 0.134145 * x * x
        )
    else:
        cumulative = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cumulative
        slope = cumulative + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope


@triton.jit
def _place(hidden, BLOCK: tl.constexpr):
    """(row, its columns) of a program: neighbours in a row one after another, as they lie in
    memory."""
    blocks = tl.cdiv(hidden, BLOCK)
    program = tl.program_id(0)
    columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
    return (program // blocks).to(tl.int64), columns


@triton.jit
def _gated_forward(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, hidden, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of columns of one row."""
    row, columns = _place(hidden, BLOCK)
    mask = columns < hidden
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activation(gate, KIND)
    tl.store(y_ptr + row * hidden + columns, (value * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    y_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    hidden,
    KIND: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dgate = dy up act'(gate), dup = dy act(gate), and y again if asked. dgate may lie over dy:
    each value is read, then written."""
    row, columns = _place(hidden, BLOCK)
    mask = columns < hidden
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation(gate, KIND)
    at = row * hidden + columns
    tl.store(dgate_ptr + at, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + at, (dy * value).to(dup_ptr.dtype.element_ty), mask=mask)
    if RECOMPUTE:
        tl.store(y_ptr + at, (value * up).to(y_ptr.dtype.element_ty), mask=mask)


def _block(hidden: int) -> int:
    return min(BLOCK, next_power_of_2(hidden))


def _grid(rows: torch.Tensor) -> tuple[int]:
    return (rows.shape[0] * cdiv(rows.shape[1], _block(rows.shape[1])),)


def gated_forward(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    """act(gate) * up, of gate's shape and dtype."""
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    hidden = gate.shape[-1]
    strides = (gate_rows.stride(0), up_rows.stride(0))
    launch(
        _gated_forward,
        _grid(gate_rows),
        gate_rows,
        up_rows,
        y,
        *strides,
        hidden,
        KIND=kind,
        BLOCK=_block(hidden),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
    return y


def gated_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: int,
    *,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    y: torch.Tensor | None = None,
) -> None:
    """Writes the gradients into the contiguous dgate (which may be dy itself) and dup, and
    act(gate) * up into y if given."""
    dy_rows, gate_rows, up_rows = as_rows(dy), as_rows(gate), as_rows(up)
    hidden = gate.shape[-1]
    strides = (dy_rows.stride(0), gate_rows.stride(0), up_rows.stride(0))
    launch(
        _gated_backward,
        _grid(gate_rows),
        dy_rows,
        gate_rows,
        up_rows,
        dgate,
        dup,
        dup if y is None else y,
        *strides,
        hidden,
        KIND=kind,
        RECOMPUTE=y is not None,
        BLOCK=_block(hidden),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    """Each activation, forward and backward."""
    found: list[Shipped] = []
    for kind, name in enumerate(("silu", "gelu_tanh", "gelu")):
        found.append(
            Shipped(
                f"gated_forward {name}",
                _gated_forward,
                {"KIND": kind, "BLOCK": BLOCK},
                NUM_WARPS,
                1,
            )
        )
        switches = {"KIND": kind, "RECOMPUTE": True, "BLOCK": BLOCK}
        found.append(Shipped(f"gated_backward {name}", _gated_backward, switches, NUM_WARPS, 1))
    return found
