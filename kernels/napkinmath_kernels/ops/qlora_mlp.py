"""A gated MLP over frozen 4-bit (or dense) weights with LoRA adapters, in one autograd function.

    e = lin_gate(x)    g = lin_up(x)    h = act(e) * g    y = lin_down(h)        each lin with its own adapter, see `qlora`

Saved: x (T x in), e and g (T x f), the adapters' projections (3 x T x r), parameters, and a seed
with dropout; h is made again. With `recompute` e and g are not saved but made again, at the price
of the two first GEMMs. Temporaries: forward h; backward d h (overwritten by d e), d g and h, each T
x f; one decoded weight. See `costs.qlora_mlp`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..errors import KernelInputError
from .gated import ACTIVATIONS, Activation, gated_gradients, gated_values
from .qlora import (
    FALLBACK,
    NO_CUDA_GRAPH,
    FrozenLinear,
    QLoRALinear,
    check_linears,
    checked_seed,
    fake_gradients,
    flatten,
)
from .qlora_branch import Branch, branches, no_gradients, rows_of


def _gate_and_up(rows: torch.Tensor, gate: Branch, up: Branch) -> tuple[torch.Tensor, ...]:
    """(e, g, projections of both)."""
    e, g = (
        torch.empty((rows.shape[0], branch.shape[0]), dtype=rows.dtype, device=rows.device)
        for branch in (gate, up)
    )
    return e, g, gate.forward(rows, e), up.forward(rows, g)


@torch.library.custom_op("napkinmath::qlora_mlp", mutates_args=(), tags=NO_CUDA_GRAPH)
def _qlora_mlp_op(
    x: torch.Tensor,
    stored: list[torch.Tensor],
    layout: list[int],
    biases: list[torch.Tensor],
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    scalings: list[float],
    probability: float,
    seed: torch.Tensor | None,
    kind: int,
    recompute: bool,
) -> list[torch.Tensor]:
    gate, up, down = branches(stored, layout, biases, lora_a, lora_b, scalings, probability, seed)
    e, g, gate_projection, up_projection = _gate_and_up(rows_of(x), gate, up)
    h = gated_values(e, g, kind)
    y = torch.empty((*x.shape[:-1], down.shape[0]), dtype=x.dtype, device=x.device)
    down_projection = down.forward(h, y.view(-1, down.shape[0]))
    kept = [x.new_empty(0), x.new_empty(0)] if recompute else [e, g]
    return [y, *kept, gate_projection, up_projection, down_projection]


@_qlora_mlp_op.register_fake
def _(
    x: torch.Tensor,
    stored: Any,
    layout: list[int],
    biases: Any,
    lora_a: list[torch.Tensor],
    *rest: Any,
) -> list[torch.Tensor]:
    rows = math.prod(x.shape[:-1])
    width, recompute = layout[1], rest[-1]
    kept = [x.new_empty((0,) if recompute else (rows, width)) for _ in range(2)]
    projections = [x.new_empty((rows, a.shape[0]) if a.numel() else (0,)) for a in lora_a]
    return [x.new_empty((*x.shape[:-1], layout[11])), *kept, *projections]


@torch.library.custom_op("napkinmath::qlora_mlp_backward", mutates_args=(), tags=NO_CUDA_GRAPH)
def _qlora_mlp_backward_op(
    dy: torch.Tensor,
    kept: list[torch.Tensor],
    projections: list[torch.Tensor],
    x: torch.Tensor,
    stored: list[torch.Tensor],
    layout: list[int],
    biases: list[torch.Tensor],
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    scalings: list[float],
    probability: float,
    seed: torch.Tensor | None,
    kind: int,
    input_gradient: bool,
    trains: list[bool],
) -> list[torch.Tensor]:
    gate, up, down = branches(stored, layout, biases, lora_a, lora_b, scalings, probability, seed)
    rows, dy_rows = rows_of(x), rows_of(dy)
    e, g = kept if len(kept) else _gate_and_up(rows, gate, up)[:2]
    dh, dg, h = (torch.empty(e.shape, dtype=e.dtype, device=e.device) for _ in range(3))
    down_through_b = down.through_b(dy_rows)
    down.input_gradient(dy_rows, down_through_b, dh, add=False)
    gated_gradients(dh, e, g, kind, dgate=dh, dup=dg, y=h)
    d_down = (
        down.adapter_gradients(dy_rows, h, projections[2], down_through_b)
        if trains[2] and down.has_adapter
        else no_gradients(x)
    )
    del h
    dx = torch.empty(x.shape if input_gradient else (0,), dtype=x.dtype, device=x.device)
    adapters: list[torch.Tensor] = []
    for i, (branch, dy_branch) in enumerate(((gate, dh), (up, dg))):
        through_b = branch.through_b(dy_branch)
        if input_gradient:
            branch.input_gradient(dy_branch, through_b, dx.view(rows.shape), add=i > 0)
        trained = branch.has_adapter and trains[i]
        adapters += (
            branch.adapter_gradients(dy_branch, rows, projections[i], through_b)
            if trained
            else no_gradients(x)
        )
    return [dx, *adapters, *d_down]


@_qlora_mlp_backward_op.register_fake
def _(
    dy: Any,
    kept: Any,
    projections: Any,
    x: torch.Tensor,
    stored: Any,
    layout: Any,
    biases: Any,
    lora_a: Any,
    lora_b: Any,
    *rest: Any,
) -> list[torch.Tensor]:
    input_gradient, trains = rest[-2:]
    return fake_gradients(x, lora_a, lora_b, input_gradient, trains)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, stored, layout, biases, lora_a, lora_b, scalings, probability, seed, kind, recompute = inputs
    ctx.options = (layout, scalings, probability, kind)
    ctx.recompute, ctx.num_stored, ctx.has_seed = recompute, len(stored), seed is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(
        False
    )  # or each saved output would get a gradient of zeros, as large as itself
    again = [output[1], output[2]] if not recompute else biases[:2]
    ctx.save_for_backward(
        x, *([seed] if ctx.has_seed else []), *again, *output[3:], *lora_a, *lora_b, *stored
    )


def _autograd(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    if gradients[0] is None:
        return None, [None] * ctx.num_stored, None, [None] * 3, [None] * 3, [None] * 3, *[None] * 5
    checks.refuse_second_derivative("qlora_mlp", FALLBACK)
    layout, scalings, probability, kind = ctx.options
    saved = list(ctx.saved_tensors)
    x, seed = saved.pop(0), saved.pop(0) if ctx.has_seed else None
    again, projections, lora_a, lora_b, stored = (
        saved[:2],
        saved[2:5],
        saved[5:8],
        saved[8:11],
        saved[11:],
    )
    nothing = x.new_empty(0)
    kept, biases = ([], [*again, nothing]) if ctx.recompute else (again, [nothing] * 3)
    needs_x, needs_a = ctx.needs_input_grad[0], list(ctx.needs_input_grad[4])
    arguments = (x, stored, layout, biases, lora_a, lora_b, scalings, probability, seed, kind)
    dx, *adapters = _qlora_mlp_backward_op(
        gradients[0], kept, projections, *arguments, needs_x, needs_a
    )
    d_a = [
        gradient if needs else None for gradient, needs in zip(adapters[::2], needs_a, strict=True)
    ]
    d_b = [
        gradient if needs else None for gradient, needs in zip(adapters[1::2], needs_a, strict=True)
    ]
    return dx if needs_x else None, [None] * ctx.num_stored, None, [None] * 3, d_a, d_b, *[None] * 5


_qlora_mlp_op.register_autograd(_autograd, setup_context=_setup)


def _check_mlp(
    x: torch.Tensor, gate: FrozenLinear, up: FrozenLinear, down: FrozenLinear, dropout: float
) -> None:
    check_linears("qlora_mlp", x, (gate, up), dropout)
    gate_shape, up_shape = tuple(gate.weight.shape), tuple(up.weight.shape)
    same = gate_shape == up_shape
    checks.require(same, "qlora_mlp", f"gate {gate_shape} and up {up_shape}", "one shape", FALLBACK)
    check_linears("qlora_mlp", x.new_empty((1, gate_shape[0])), (down,), dropout)


def qlora_mlp(
    x: torch.Tensor,
    gate: FrozenLinear,
    up: FrozenLinear,
    down: FrozenLinear,
    *,
    activation: Activation = Activation.SILU,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)), (..., out of down) in x's dtype (autocast's where it is on).

    `recompute` saves x alone and repeats the first two GEMMs in the backward. Raises
    KernelInputError.
    """
    _check_mlp(x, gate, up, down, dropout)
    known = ", ".join(f"Activation.{kind.name}" for kind in Activation)
    checks.require(
        isinstance(activation, Activation),
        "qlora_mlp",
        f"activation {activation!r}",
        known,
        FALLBACK,
    )
    x = to_autocast_dtype(x)
    seed = checked_seed("qlora_mlp", x, dropout, seed)
    arguments = flatten((gate, up, down), x)
    return _qlora_mlp_op(x, *arguments, float(dropout), seed, int(activation), recompute)[0]


class QLoRAMLP(torch.nn.Module):
    """A gated MLP of three `QLoRALinear`s, run and differentiated as one op."""

    def __init__(
        self,
        gate: QLoRALinear,
        up: QLoRALinear,
        down: QLoRALinear,
        activation: str = "silu",
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise KernelInputError(
                "QLoRAMLP", f"activation {activation!r}", ", ".join(ACTIVATIONS), FALLBACK
            )
        self.gate, self.up, self.down = gate, up, down
        self.activation = ACTIVATIONS[activation]
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `qlora_mlp`."""
        dropout = self.gate.dropout if self.training else 0.0
        linears = (self.gate.frozen(), self.up.frozen(), self.down.frozen())
        return qlora_mlp(
            x, *linears, activation=self.activation, dropout=dropout, recompute=self.recompute
        )
