"""Frozen linears with their adapters as the fused QLoRA ops take them: what a user hands over, the
checks at the door, and a group that keeps both for the next call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import checks
from ..backend import choose_backend, reference_is_forced
from ..errors import KernelInputError
from .eager import is_plain
from .qlora_branch import Branch, branches, weight_layout, weight_tensors
from .stored_weight import StoredWeight

FALLBACK = "peft's own LoRA layer"


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A LoRA adapter: a (r, in) and b (out, r), bf16, fp16 or fp32 masters (computed in x's dtype),
    and what their product is scaled by."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class FrozenLinear:
    """A frozen linear: its weight, in 4 or 8 bits or dense (out, in), and what may come with it."""

    weight: StoredWeight | torch.Tensor
    bias: torch.Tensor | None = None
    adapter: LoraAdapter | None = None


def flatten(linears: Sequence[FrozenLinear], x: torch.Tensor) -> tuple[Any, ...]:
    """The ops' arguments: stored tensors, layout, biases, lora_a, lora_b, scalings."""
    nothing = x.new_empty(0)
    adapters = [linear.adapter or LoraAdapter(nothing, nothing, 1.0) for linear in linears]
    return (
        [tensor for linear in linears for tensor in weight_tensors(linear.weight)],
        [number for linear in linears for number in weight_layout(linear.weight)],
        [nothing if linear.bias is None else linear.bias.detach() for linear in linears],
        [adapter.a for adapter in adapters],
        [adapter.b for adapter in adapters],
        [float(adapter.scaling) for adapter in adapters],
    )


def check_linears(
    op: str, x: torch.Tensor, linears: Sequence[FrozenLinear], dropout: float
) -> None:
    """Raises KernelInputError unless every linear takes x and every adapter fits its linear."""
    checks.require_tensors(op, FALLBACK, x=x)
    checks.require_dtype(op, "x", x, FALLBACK)
    checks.require(
        checks.is_number(dropout) and 0.0 <= dropout < 1.0,
        op,
        f"dropout {dropout}",
        "0 up to, not including, 1",
        FALLBACK,
    )
    checks.require(
        x.dim() >= 1 and len(linears) > 0,
        op,
        f"x of shape {tuple(x.shape)}, {len(linears)} linears",
        "(..., in), 1 or more",
        FALLBACK,
    )
    choose_backend(op, x)
    for linear in linears:
        _check_linear(op, x, linear)


def _check_linear(op: str, x: torch.Tensor, linear: FrozenLinear) -> None:
    if not isinstance(linear.weight, StoredWeight):
        checks.require_tensors(op, FALLBACK, weight=linear.weight)
        checks.require_dtype(op, "weight", linear.weight, FALLBACK)
    shape = tuple(linear.weight.shape)
    fits = len(shape) == 2 and shape[1] == x.shape[-1]
    checks.require(
        fits, op, f"weight {shape} for x {tuple(x.shape)}", f"(out, {x.shape[-1]})", FALLBACK
    )
    first = weight_tensors(linear.weight)[0]
    if first.requires_grad:
        raise KernelInputError(
            op,
            "a base weight that requires a gradient",
            "a frozen one",
            "torch.nn.functional.linear",
        )
    adapter = linear.adapter
    lora = {} if adapter is None else {"lora_a": adapter.a, "lora_b": adapter.b}
    checks.require_tensors(op, FALLBACK, **lora)
    checks.require_same_device(op, FALLBACK, x=x, weight=first, bias=linear.bias, **lora)
    if linear.bias is not None:
        checks.require_dtype(op, "bias", linear.bias, FALLBACK)
        checks.require_shape(op, "bias", linear.bias, (shape[0],), FALLBACK)
        checks.require(
            not linear.bias.requires_grad,
            op,
            "a bias that requires a gradient",
            "a frozen one",
            FALLBACK,
        )
    if adapter is not None:
        a, b = adapter.a, adapter.b
        checks.require(
            checks.is_number(adapter.scaling),
            op,
            f"scaling {adapter.scaling!r}",
            "a finite number",
            FALLBACK,
        )
        checks.require_dtype(op, "lora_a", a, FALLBACK)
        checks.require_dtype(op, "lora_b", b, FALLBACK, (a.dtype,))
        matches = (
            a.dim() == 2
            and b.dim() == 2
            and a.shape == (b.shape[1], shape[1])
            and b.shape[0] == shape[0]
        )
        matches = matches and a.shape[0] > 0
        accepted = f"(r, {shape[1]}) and ({shape[0]}, r), r 1 or more"
        checks.require(
            matches, op, f"adapter a {tuple(a.shape)}, b {tuple(b.shape)}", accepted, FALLBACK
        )
        checks.require(
            a.requires_grad == b.requires_grad,
            op,
            "one adapter matrix trained without the other",
            "both or neither",
            FALLBACK,
        )


class LinearGroup:
    """Linears that read one x. Kept from call to call, it is checked and laid out once, and again
    when x or an adapter changes in type or place, or in whether it is trained."""

    def __init__(self, linears: Sequence[FrozenLinear]) -> None:
        self.linears = tuple(linears)
        self.lora_a: list[torch.Tensor] = []
        self.lora_b: list[torch.Tensor] = []
        self.stored: list[torch.Tensor] = []
        self.arguments: tuple[Any, ...] = ()
        self.branches: list[Branch] = []
        self.is_plain = False
        self._checked: Any = None
        self._prepared: Any = None

    @property
    def is_dense(self) -> bool:
        """True if there is nothing to fuse: plain weights without adapters."""
        return all(
            linear.adapter is None and isinstance(linear.weight, torch.Tensor)
            for linear in self.linears
        )

    @staticmethod
    def of(linears: Sequence[FrozenLinear] | LinearGroup) -> LinearGroup:
        """`linears` if it is a group that may keep what it finds out, else a group of them."""
        if not isinstance(linears, LinearGroup):
            return LinearGroup(linears)
        return LinearGroup(linears.linears) if torch.compiler.is_compiling() else linears

    def __getstate__(self) -> dict[str, Any]:
        return LinearGroup(self.linears).__dict__  # a copy reads its own tensors

    def _kind(self, x: torch.Tensor) -> tuple[Any, ...]:
        if not isinstance(x, torch.Tensor):
            return (x,)
        found: list[Any] = [x.dtype, x.device, x.layout, x.shape[-1:], reference_is_forced()]
        for linear in self.linears:
            weight, bias, adapter = linear.weight, linear.bias, linear.adapter
            first = weight_tensors(weight)[0]
            found += (first.device, first.requires_grad, bias is not None and bias.requires_grad)
            if adapter is not None:
                a, b = adapter.a, adapter.b
                found += (a.dtype, b.dtype, a.device, a.requires_grad, b.requires_grad)
        return tuple(found)

    def _refuse(self, op: str, x: torch.Tensor, dropout: float) -> None:
        check_linears(op, x, self.linears, dropout)

    def check(self, op: str, x: torch.Tensor, dropout: float) -> None:
        """Raises KernelInputError as `check_linears` does."""
        if self._checked is None or forward_ad._current_level >= 0:
            self._refuse(op, x, dropout)
            self._checked = ()  # most groups are of one call: what it was checked for costs time
        elif (kind := (op, dropout, self._kind(x))) != self._checked:
            self._refuse(op, x, dropout)
            self._checked = kind

    def prepare(self, x: torch.Tensor) -> None:
        """Lays the group out for an x of this dtype and device."""
        kind = x.dtype, x.device
        if kind == self._prepared:
            return
        self.arguments = flatten(self.linears, x)
        self.stored, _, _, self.lora_a, self.lora_b, _ = self.arguments
        self.branches = branches(*self.arguments)
        self.is_plain = all(map(is_plain, (*self.stored, *self.lora_a, *self.lora_b)))
        self._prepared = kind
