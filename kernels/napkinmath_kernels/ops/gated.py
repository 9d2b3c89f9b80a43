"""Gated activations: y = act(gate) * up, with SiLU (SwiGLU) or GELU (GeGLU).

Computed in fp32 and rounded once. Saved for the backward: gate and up, the inputs themselves; no
temporaries. Bytes moved: forward 3 tensors, backward 5. Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

import torch

from .. import checks
from ..backend import runs_triton
from .eager import run, short_way


class Activation(enum.IntEnum):
    """The gate's non-linearity; the numbers are those the kernels switch on."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2


#: Names of transformers' `hidden_act` that these kernels compute.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}
FALLBACK = "torch.nn.functional.silu(gate) * up"


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _value_and_slope(x: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == Activation.SILU:
        sigmoid = torch.sigmoid(x)
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    if kind == Activation.GELU_TANH:
        root = math.sqrt(2 / math.pi)
        inner = 2 * root * x * (1 + 0.044715 * x * x)
        sigmoid, complement = torch.sigmoid(inner), torch.sigmoid(-inner)
        return x * sigmoid, sigmoid + 2 * x * sigmoid * complement * root * (
            1 + 3 * 0.044715 * x * x
        )
    cumulative = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * cumulative, cumulative + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def gated_values(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    """act(gate) * up, below the dispatcher: for the ops that fuse it."""
    if runs_triton("gated", gate):
        from ..triton_kernels.gated import gated_forward

        return gated_forward(gate, up, kind)
    return (_value_and_slope(_compute(gate), kind)[0] * _compute(up)).to(gate.dtype).contiguous()


def gated_gradients(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: int,
    *,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    y: torch.Tensor | None = None,
) -> None:
    """Writes dgate (which may be dy itself), dup, and act(gate) * up into y if given; below the
    dispatcher."""
    if runs_triton("gated", gate):
        from ..triton_kernels.gated import gated_backward

        return gated_backward(dy, gate, up, kind, dgate=dgate, dup=dup, y=y)
    value, slope = _value_and_slope(_compute(gate), kind)
    wide_dy, wide_up = _compute(dy), _compute(up)
    if y is not None:
        y.copy_(value * wide_up)
    dup.copy_(wide_dy * value)
    dgate.copy_(wide_dy * wide_up * slope)
    return None


@torch.library.custom_op("napkinmath::gated", mutates_args=())
def _gated_op(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    return gated_values(gate, up, kind)


@_gated_op.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("napkinmath::gated_backward", mutates_args=())
def _gated_backward_op(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    gated_gradients(dy, gate, up, kind, dgate=dgate, dup=dup)
    return dgate, dup


@_gated_backward_op.register_fake
def _(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    checks.refuse_second_derivative("gated", FALLBACK)
    return (*run(_gated_backward_op, dy, *ctx.saved_tensors, ctx.kind), None)


_gated = short_way(_gated_op, _setup, _autograd)


@checks.remembered
def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    checks.require_tensors("gated", FALLBACK, gate=gate, up=up)
    checks.require_dtype("gated", "gate", gate, FALLBACK)
    fits = gate.dim() > 0 and gate.shape[-1] > 0
    checks.require(
        fits,
        "gated",
        f"gate of shape {tuple(gate.shape)}",
        "(..., hidden), hidden 1 or more",
        FALLBACK,
    )
    checks.require_shape("gated", "up", up, tuple(gate.shape), FALLBACK)
    checks.require_dtype("gated", "up", up, FALLBACK, (gate.dtype,))
    checks.require_same_device("gated", FALLBACK, gate=gate, up=up)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up of two tensors of one shape and dtype (bf16, fp16, fp32). Raises
    KernelInputError."""
    _check(gate, up)
    return _gated(gate, up, int(activation))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return gated(gate, up, Activation.SILU)


def geglu(
    gate: torch.Tensor, up: torch.Tensor, *, approximate: Literal["tanh", "none"] = "tanh"
) -> torch.Tensor:
    """gelu(gate, approximate) * up."""
    checks.require(
        approximate in ("tanh", "none"),
        "geglu",
        f"approximate={approximate!r}",
        "'tanh' or 'none'",
        FALLBACK,
    )
    return gated(gate, up, Activation.GELU_TANH if approximate == "tanh" else Activation.GELU)


class GatedActivation(torch.nn.Module):
    """act(gate) * up as a module, by transformers' name of the activation ("silu",
    "gelu_pytorch_tanh", "gelu")."""

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        known = ", ".join(ACTIVATIONS)
        checks.require(
            activation in ACTIVATIONS,
            "GatedActivation",
            f"activation {activation!r}",
            known,
            FALLBACK,
        )
        self.activation = ACTIVATIONS[activation]

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """See `gated`."""
        return gated(gate, up, self.activation)
