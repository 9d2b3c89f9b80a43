"""A gated MLP over frozen 4-bit (or dense) weights with LoRA adapters, in one autograd function.

    e = lin_gate(x)    g = lin_up(x)    h = act(e) * g    y = lin_down(h)        each lin with its own adapter, see `qlora`

Saved: x (T x in), e and g (T x f), the adapters' projections (3 x T x r), parameters, and a seed
with dropout; h is made again. With `recompute` e and g are not saved but made again, at the price
of the two first GEMMs. Temporaries: forward h; backward d h (overwritten by d e), d g and h, each T
x f; one decoded weight. See `costs.qlora_mlp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..errors import KernelInputError
from .eager import below_autograd, direct, is_plain, is_unwatched
from .gated import ACTIVATIONS, Activation, gated_gradients, gated_values
from .linear_group import FALLBACK, FrozenLinear, LinearGroup, check_linears
from .qlora import (
    NO_CUDA_GRAPH,
    QLoRALinear,
    asked_for,
    checked_seed,
    fake_gradients,
    flat_dropout,
    kept_group,
)
from .qlora_branch import Branch, Dropout, branches, dropout_of, no_gradients, rows_of

_KNOWN = ", ".join(f"Activation.{kind.name}" for kind in Activation)


def _forward(
    x: torch.Tensor, group: Sequence[Branch], dropout: Dropout | None, kind: int, recompute: bool
) -> list[torch.Tensor]:
    """[y, e, g, projections of gate, up and down], e and g empty with `recompute`; below the
    dispatcher."""
    (gate, up, down), rows = group, rows_of(x)
    e, gate_projection = gate.forward(rows, dropout)
    g, up_projection = up.forward(rows, dropout)
    y, down_projection = down.forward(gated_values(e, g, kind), dropout)
    kept = [x.new_empty(0), x.new_empty(0)] if recompute else [e, g]
    y = y.view(*x.shape[:-1], down.shape[0])
    return [y, *kept, gate_projection, up_projection, down_projection]


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
    group = branches(stored, layout, biases, lora_a, lora_b, scalings)
    return _forward(x, group, dropout_of(probability, seed), kind, recompute)


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
    group = branches(stored, layout, biases, lora_a, lora_b, scalings)
    dropout = dropout_of(probability, seed)
    return _backward(dy, kept, projections, x, group, dropout, kind, input_gradient, trains)


def _backward(
    dy: torch.Tensor,
    kept: Sequence[torch.Tensor],
    projections: Sequence[torch.Tensor],
    x: torch.Tensor,
    group: Sequence[Branch],
    dropout: Dropout | None,
    kind: int,
    input_gradient: bool,
    trains: Sequence[bool],
) -> list[torch.Tensor]:
    """[dx, then dA and dB of gate, up and down], empty where not asked for; below the
    dispatcher."""
    (gate, up, down), rows, dy = group, rows_of(x), rows_of(dy)
    e, g = kept if len(kept) else (one.forward(rows, dropout)[0] for one in (gate, up))
    through_b = down.through_b(dy)
    dh = down.input_gradient(dy, through_b, None, dropout)
    dg, h = torch.empty_like(g), torch.empty_like(g)
    gated_gradients(dh, e, g, kind, dgate=dh, dup=dg, y=h)
    d_down = (
        down.adapter_gradients(dy, h, projections[2], through_b, dropout)
        if trains[2] and down.has_adapter
        else no_gradients(x)
    )
    del h
    dx: torch.Tensor | None = None
    adapters: list[torch.Tensor] = []
    for i, (branch, dy_branch) in enumerate(((gate, dh), (up, dg))):
        through_b = branch.through_b(dy_branch)
        if input_gradient:
            dx = branch.input_gradient(dy_branch, through_b, dx, dropout)
        adapters += (
            branch.adapter_gradients(dy_branch, rows, projections[i], through_b, dropout)
            if branch.has_adapter and trains[i]
            else no_gradients(x)
        )
    return [x.new_empty(0) if dx is None else dx.view(x.shape), *adapters, *d_down]


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
    d_a, d_b = asked_for(adapters, needs_a)
    return dx if needs_x else None, [None] * ctx.num_stored, None, [None] * 3, d_a, d_b, *[None] * 5


_qlora_mlp_op.register_autograd(_autograd, setup_context=_setup)


class _QLoRAMLP(torch.autograd.Function):
    """The op without the dispatcher: the same values, gradients and saved tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        group: MlpGroup,
        dropout: Dropout | None,
        kind: int,
        recompute: bool,
        x: torch.Tensor,
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        with below_autograd():
            y, *kept = _forward(x, group.branches, dropout, kind, recompute)
        if recompute:
            kept[:2] = [branch.bias for branch in group.branches[:2]]
        ctx.options = (group, dropout, kind, recompute)
        ctx.set_materialize_grads(False)
        seed = () if dropout is None else (dropout.seed,)
        ctx.save_for_backward(x, *seed, *kept, *adapters, *group.stored)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        dy = gradients[0]
        if dy is None:
            return (None,) * 11
        checks.refuse_second_derivative("qlora_mlp", FALLBACK)
        group, dropout, kind, recompute = ctx.options
        x, *saved = ctx.saved_tensors[:7] if dropout is not None else ctx.saved_tensors[:6]
        saved = saved[-5:]
        kept, projections = ([] if recompute else saved[:2]), saved[2:]
        needs_x, needs_a = ctx.needs_input_grad[4], list(ctx.needs_input_grad[5:8])
        if is_unwatched() and is_plain(dy):
            with below_autograd():
                dx, *adapters = _backward(
                    dy, kept, projections, x, group.branches, dropout, kind, needs_x, needs_a
                )
        else:
            dx, *adapters = _qlora_mlp_backward_op(
                dy,
                kept,
                projections,
                x,
                *group.arguments,
                *flat_dropout(dropout),
                kind,
                needs_x,
                needs_a,
            )
        d_a, d_b = asked_for(adapters, needs_a)
        return None, None, None, None, dx if needs_x else None, *d_a, *d_b


_qlora_mlp_direct = direct(_QLoRAMLP)


class MlpGroup(LinearGroup):
    """The gate, up and down projections of a gated MLP; see `LinearGroup`."""

    def _refuse(self, op: str, x: torch.Tensor, dropout: float) -> None:
        gate, up, down = self.linears
        check_linears(op, x, (gate, up), dropout)
        gate_shape, up_shape = tuple(gate.weight.shape), tuple(up.weight.shape)
        same = gate_shape == up_shape
        checks.require(same, op, f"gate {gate_shape} and up {up_shape}", "one shape", FALLBACK)
        check_linears(op, x.new_empty((1, gate_shape[0])), (down,), dropout)


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
    options = (activation, dropout, seed, recompute)
    return qlora_mlp_of(x, MlpGroup((gate, up, down)), *options)


def qlora_mlp_of(
    x: torch.Tensor,
    group: MlpGroup,
    activation: Activation = Activation.SILU,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """`qlora_mlp` of a group that may be kept from call to call."""
    if torch.compiler.is_compiling():
        group = MlpGroup(group.linears)
    group.check("qlora_mlp", x, dropout)
    checks.require(
        isinstance(activation, Activation),
        "qlora_mlp",
        f"activation {activation!r}",
        _KNOWN,
        FALLBACK,
    )
    x = to_autocast_dtype(x)
    group.prepare(x)
    seed = checked_seed("qlora_mlp", x, dropout, seed)
    kind = int(activation)
    if group.is_plain and is_unwatched() and is_plain(x):
        options = (dropout_of(dropout, seed), kind, recompute)
        return _qlora_mlp_direct(group, *options, x, *group.lora_a, *group.lora_b)
    return _qlora_mlp_op(x, *group.arguments, float(dropout), seed, kind, recompute)[0]


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
        self._group: MlpGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `qlora_mlp`."""
        dropout = self.gate.dropout if self.training else 0.0
        group = kept_group(self._group, (self.gate, self.up, self.down), MlpGroup)
        if group is not self._group:
            self._group = group
        return qlora_mlp_of(x, group, self.activation, dropout=dropout, recompute=self.recompute)
