"""Linears over frozen 4-bit (or dense) weights with LoRA adapters, that read one x: one for a
projection, three for Q, K and V.

    y_i = x W_i^T + bias_i + scaling_i * dropout_i(x) A_i^T B_i^T

Forward: decode W_i into the shared buffer, one GEMM, two thin ones. Backward: decode W_i again, one
GEMM for dx, three thin ones. Saved for the backward: x once for all of them (T x in, x's dtype),
dropout(x) A_i^T (T x r), and the parameters; with dropout a seed of 8 bytes in place of masks.
Temporaries: one decoded weight; the dropped x with dropout. FLOPs and bytes: `costs.qlora_linears`.
Sources: Hu et al. 2021 (arXiv 2106.09685), Dettmers et al. 2023 (arXiv 2305.14314).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import choose_backend
from ..errors import KernelInputError
from .dropout import new_seed
from .eager import runs_eagerly
from .nf4 import QuantizedWeight, quantize
from .qlora_branch import (
    LAYOUT_WIDTH,
    branches,
    no_gradients,
    rows_of,
    weight_layout,
    weight_tensors,
)

FALLBACK = "peft's own LoRA layer"
# : The shared weight buffer outlives a graph's memory: torch.compile leaves these ops out of its
# CUDA graphs.
NO_CUDA_GRAPH = (torch.Tag.cudagraph_unsafe,)


def _forward(x: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    projections: list[torch.Tensor] = []
    rows = rows_of(x)
    for branch in branches(*arguments):
        y = torch.empty((*x.shape[:-1], branch.shape[0]), dtype=x.dtype, device=x.device)
        projections.append(branch.forward(rows, y.view(-1, branch.shape[0])))
        outputs.append(y)
    return outputs + projections


@torch.library.custom_op("napkinmath::qlora_linears", mutates_args=(), tags=NO_CUDA_GRAPH)
def _qlora_linears_op(
    x: torch.Tensor,
    stored: list[torch.Tensor],
    layout: list[int],
    biases: list[torch.Tensor],
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    scalings: list[float],
    probability: float,
    seed: torch.Tensor | None,
) -> list[torch.Tensor]:
    return _forward(x, stored, layout, biases, lora_a, lora_b, scalings, probability, seed)


@_qlora_linears_op.register_fake
def _(
    x: torch.Tensor,
    stored: list[torch.Tensor],
    layout: list[int],
    biases: Any,
    lora_a: list[torch.Tensor],
    *_: Any,
) -> list[torch.Tensor]:
    outputs = [x.new_empty((*x.shape[:-1], rows)) for rows in layout[1::LAYOUT_WIDTH]]
    return outputs + [
        x.new_empty((math.prod(x.shape[:-1]), a.shape[0]) if a.numel() else (0,)) for a in lora_a
    ]


@torch.library.custom_op("napkinmath::qlora_linears_backward", mutates_args=(), tags=NO_CUDA_GRAPH)
def _qlora_linears_backward_op(
    gradients: list[torch.Tensor],
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
    input_gradient: bool,
    trains: list[bool],
) -> list[torch.Tensor]:
    arguments = (stored, layout, biases, lora_a, lora_b, scalings, probability, seed)
    return _backward(gradients, projections, x, arguments, input_gradient, trains)


def _backward(
    gradients: Sequence[torch.Tensor],
    projections: Sequence[torch.Tensor],
    x: torch.Tensor,
    arguments: tuple[Any, ...],
    input_gradient: bool,
    trains: Sequence[bool],
) -> list[torch.Tensor]:
    """[dx, then dA and dB of each linear], empty where not asked for; below the dispatcher."""
    rows = rows_of(x)
    dx = torch.empty(x.shape if input_gradient else (0,), dtype=x.dtype, device=x.device)
    adapters: list[torch.Tensor] = []
    for i, branch in enumerate(branches(*arguments)):
        dy = rows_of(gradients[i])
        through_b = branch.through_b(dy)
        if input_gradient:
            branch.input_gradient(dy, through_b, dx.view(rows.shape), add=i > 0)
        trained = branch.has_adapter and trains[i]
        adapters += (
            branch.adapter_gradients(dy, rows, projections[i], through_b)
            if trained
            else no_gradients(x)
        )
    return [dx, *adapters]


@_qlora_linears_backward_op.register_fake
def _(
    gradients: Any,
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


def fake_gradients(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    input_gradient: bool,
    trains: Sequence[bool],
) -> list[torch.Tensor]:
    """Shapes of what a backward op returns: dx, then (dA, dB) of each linear, empty where not asked
    for."""
    found = [x.new_empty(x.shape if input_gradient else (0,))]
    for a, b, train in zip(lora_a, lora_b, trains, strict=True):
        found += (
            [a.new_empty(a.shape), b.new_empty(b.shape)] if train and a.numel() else no_gradients(x)
        )
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    lora_a = inputs[4]
    projections = output[len(lora_a) :]
    ctx.mark_non_differentiable(*projections)
    _save(ctx, inputs, projections)


def _save(ctx: Any, inputs: tuple[Any, ...], projections: Sequence[torch.Tensor]) -> None:
    x, stored, layout, _, lora_a, lora_b, scalings, probability, seed = inputs
    ctx.layout, ctx.scalings, ctx.probability = layout, scalings, probability
    ctx.counts = (len(stored), len(lora_a))
    ctx.has_seed = seed is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x, *stored, *lora_a, *lora_b, *projections, *([seed] if ctx.has_seed else [])
    )


def _gradients(
    ctx: Any, gradients: Sequence[torch.Tensor | None], needs_x: bool, trains: list[bool]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """(dx, dA of each linear, dB of each), None where not asked for."""
    checks.refuse_second_derivative("qlora_linears", FALLBACK)
    num_stored, count = ctx.counts
    saved = list(ctx.saved_tensors)
    eager = runs_eagerly([*saved, *(dy for dy in gradients if dy is not None)])
    x, seed = saved.pop(0), saved.pop() if ctx.has_seed else None
    stored, saved = saved[:num_stored], saved[num_stored:]
    lora_a, lora_b, projections = saved[:count], saved[count : 2 * count], saved[2 * count :]
    biases = [x.new_empty(0)] * count
    arguments = (stored, ctx.layout, biases, lora_a, lora_b, ctx.scalings, ctx.probability, seed)
    upstream = [
        x.new_zeros((*x.shape[:-1], ctx.layout[i * LAYOUT_WIDTH + 1])) if dy is None else dy
        for i, dy in enumerate(gradients[:count])
    ]
    if eager:
        dx, *adapters = _backward(upstream, projections, x, arguments, needs_x, trains)
    else:
        dx, *adapters = _qlora_linears_backward_op(
            upstream, projections, x, *arguments, needs_x, trains
        )
    d_a = [found if needs else None for found, needs in zip(adapters[::2], trains, strict=True)]
    d_b = [found if needs else None for found, needs in zip(adapters[1::2], trains, strict=True)]
    return dx if needs_x else None, d_a, d_b


def _autograd(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    num_stored, count = ctx.counts
    needs = ctx.needs_input_grad
    dx, d_a, d_b = _gradients(ctx, gradients, needs[0], list(needs[4]))
    nothing = [None] * count
    return dx, [None] * num_stored, None, nothing, d_a, d_b, None, None, None


_qlora_linears_op.register_autograd(_autograd, setup_context=_setup)


class _QLoRALinears(torch.autograd.Function):
    """The op without the dispatcher: the same values, gradients and saved tensors.

    autograd sees tensors outside of lists only, so x and the adapters are given a second time.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: tuple[Any, ...], x: torch.Tensor, *adapters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found = _forward(*inputs)
        count = len(adapters) // 2
        _save(ctx, inputs, found[count:])
        return tuple(found[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _, needs_x, *needs = ctx.needs_input_grad
        dx, d_a, d_b = _gradients(ctx, gradients, needs_x, needs[: len(needs) // 2])
        return None, dx, *d_a, *d_b


def _call(*inputs: Any) -> list[torch.Tensor]:
    """The outputs of the op, through the dispatcher only where something looks at it."""
    x, stored, _, biases, lora_a, lora_b, _, _, _ = inputs
    if runs_eagerly([x, *stored, *biases, *lora_a, *lora_b]):
        return list(_QLoRALinears.apply(inputs, x, *lora_a, *lora_b))
    return _qlora_linears_op(*inputs)[: len(lora_a)]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A LoRA adapter: a (r, in) and b (out, r), bf16, fp16 or fp32 masters (computed in x's dtype),
    and what their product is scaled by."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class FrozenLinear:
    """A frozen linear: its weight, 4-bit or dense (out, in), and what may come with it."""

    weight: QuantizedWeight | torch.Tensor
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
    if not isinstance(linear.weight, QuantizedWeight):
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


def checked_seed(
    op: str, x: torch.Tensor, dropout: float, seed: torch.Tensor | None
) -> torch.Tensor | None:
    """The seed of this call: none without dropout, a new one unless it is given."""
    if dropout == 0.0:
        return None
    if seed is None:
        return new_seed(x.device)
    checks.require_tensors(op, FALLBACK, seed=seed)
    fits = seed.dtype is torch.int64 and seed.numel() == 1 and seed.device == x.device
    given = f"seed {seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
    checks.require(fits, op, given, f"int64 of shape (1,) on {x.device}", FALLBACK)
    return seed


def qlora_linears(
    x: torch.Tensor,
    linears: Sequence[FrozenLinear],
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """One output for each linear, (..., out_i) in x's dtype (autocast's where it is on).

    x (..., in) bf16, fp16 or fp32. `dropout` acts on the adapters' input, each by a mask of its
    own; pass 0 in evaluation. The seed, (1,) int64, is drawn from the device's generator unless
    given. Raises KernelInputError.
    """
    check_linears("qlora_linears", x, linears, dropout)
    x = to_autocast_dtype(x)
    seed = checked_seed("qlora_linears", x, dropout, seed)
    return _call(x, *flatten(linears, x), float(dropout), seed)


def qlora_linear(
    x: torch.Tensor,
    weight: QuantizedWeight | torch.Tensor,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    scaling: float = 1.0,
    *,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias + scaling * dropout(x) A^T B^T; see `qlora_linears`."""
    if (lora_a is None) != (lora_b is None):
        raise KernelInputError(
            "qlora_linear", "one of lora_a and lora_b", "both or neither", FALLBACK
        )
    adapter = (
        LoraAdapter(lora_a, lora_b, scaling) if lora_a is not None and lora_b is not None else None
    )
    return qlora_linears(x, [FrozenLinear(weight, bias, adapter)], dropout=dropout, seed=seed)[0]


def _check_module(
    weight: Any,
    rank: Any,
    alpha: Any,
    bias: torch.Tensor | None,
    dropout: Any,
    adapter_dtype: torch.dtype,
) -> None:
    op = "QLoRALinear"
    if not isinstance(weight, QuantizedWeight):
        checks.require_tensors(op, FALLBACK, weight=weight)
    checks.require(
        len(weight.shape) == 2,
        op,
        f"a weight of shape {tuple(weight.shape)}",
        "(out, in)",
        FALLBACK,
    )
    checks.require(checks.is_whole(rank) and rank > 0, op, f"rank {rank!r}", "1 or more", FALLBACK)
    checks.require(
        alpha is None or checks.is_number(alpha),
        op,
        f"alpha {alpha!r}",
        "None or a finite number",
        FALLBACK,
    )
    checks.require(
        checks.is_number(dropout) and 0.0 <= dropout < 1.0,
        op,
        f"dropout {dropout!r}",
        "0 up to, not including, 1",
        FALLBACK,
    )
    names = checks.dtype_names((*checks.KERNEL_DTYPES, torch.float64))
    checks.require(
        adapter_dtype in (*checks.KERNEL_DTYPES, torch.float64),
        op,
        f"adapter_dtype {adapter_dtype}",
        names,
        FALLBACK,
    )
    if bias is not None:
        checks.require_shape(op, "bias", bias, (weight.shape[0],), FALLBACK)


class QLoRALinear(torch.nn.Module):
    """A frozen linear, quantized to 4 bits, with a LoRA adapter that starts as zero.

    `lora_a` is drawn as Kaiming uniform and `lora_b` is zero, as PEFT has it; scaling is alpha /
    rank.
    """

    def __init__(
        self,
        weight: QuantizedWeight | torch.Tensor,
        rank: int,
        alpha: float | None = None,
        *,
        bias: torch.Tensor | None = None,
        dropout: float = 0.0,
        adapter_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_module(weight, rank, alpha, bias, dropout, adapter_dtype)
        self.weight = weight
        self.scaling = (rank if alpha is None else alpha) / rank
        self.dropout = dropout
        device = weight_tensors(weight)[0].device
        out_features, in_features = weight.shape
        self.bias: torch.Tensor | None
        self.register_buffer("bias", bias)
        self.lora_a = torch.nn.Parameter(
            torch.empty(rank, in_features, dtype=adapter_dtype, device=device)
        )
        self.lora_b = torch.nn.Parameter(
            torch.zeros(out_features, rank, dtype=adapter_dtype, device=device)
        )
        torch.nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    @staticmethod
    def from_linear(
        linear: torch.nn.Linear, rank: int, alpha: float | None = None, **options: Any
    ) -> QLoRALinear:
        """Quantizes a linear's weight to NF4 with nested scales."""
        own = cast("torch.Tensor | None", linear.bias)  # torch's stub leaves the None out
        bias = None if own is None else own.detach()
        return QLoRALinear(quantize(linear.weight.detach()), rank, alpha, bias=bias, **options)

    def frozen(self) -> FrozenLinear:
        """What the fused ops take."""
        return FrozenLinear(
            self.weight, self.bias, LoraAdapter(self.lora_a, self.lora_b, self.scaling)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `qlora_linear`."""
        return qlora_linears(x, [self.frozen()], dropout=self.dropout if self.training else 0.0)[0]


class QLoRAQKV(torch.nn.Module):
    """The query, key and value projections of one x, which is read and saved once; K and V may be
    narrower (grouped heads)."""

    def __init__(self, q: QLoRALinear, k: QLoRALinear, v: QLoRALinear) -> None:
        super().__init__()
        self.q, self.k, self.v = q, k, v

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[q, k, v] of x; see `qlora_linears`."""
        dropout = self.q.dropout if self.training else 0.0
        return qlora_linears(
            x, [self.q.frozen(), self.k.frozen(), self.v.frozen()], dropout=dropout
        )
