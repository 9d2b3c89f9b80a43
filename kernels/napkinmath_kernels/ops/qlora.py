"""Linears over frozen 4-bit, 8-bit or dense weights with LoRA adapters, that read one x: one for a
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
from typing import Any, TypeVar, cast

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..errors import KernelInputError
from .dropout import new_seed
from .eager import below_autograd, direct, is_plain, is_unwatched
from .linear_group import FALLBACK, FrozenLinear, LinearGroup, LoraAdapter
from .nf4 import quantize
from .qlora_branch import (
    LAYOUT_WIDTH,
    Branch,
    Dropout,
    branches,
    dropout_of,
    no_gradients,
    rows_of,
    weight_tensors,
)
from .stored_weight import StoredWeight

# : The shared weight buffer outlives a graph's memory: torch.compile leaves these ops out of its
# CUDA graphs.
NO_CUDA_GRAPH = (torch.Tag.cudagraph_unsafe,)


def _forward(
    x: torch.Tensor, group: Sequence[Branch], dropout: Dropout | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(y of each linear, projection of each); below the dispatcher."""
    rows, leading = rows_of(x), x.shape[:-1]
    outputs: list[torch.Tensor] = []
    projections: list[torch.Tensor] = []
    for branch in group:
        y, projection = branch.forward(rows, dropout)
        outputs.append(y if len(leading) == 1 else y.view(*leading, branch.shape[0]))
        projections.append(projection)
    return outputs, projections


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
    group = branches(stored, layout, biases, lora_a, lora_b, scalings)
    outputs, projections = _forward(x, group, dropout_of(probability, seed))
    return outputs + projections


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
    group = branches(stored, layout, biases, lora_a, lora_b, scalings)
    dropout = dropout_of(probability, seed)
    return _backward(gradients, projections, x, group, dropout, input_gradient, trains)


def _backward(
    gradients: Sequence[torch.Tensor],
    projections: Sequence[torch.Tensor],
    x: torch.Tensor,
    group: Sequence[Branch],
    dropout: Dropout | None,
    input_gradient: bool,
    trains: Sequence[bool],
) -> list[torch.Tensor]:
    """[dx, then dA and dB of each linear], empty where not asked for; below the dispatcher."""
    rows = rows_of(x)
    dx: torch.Tensor | None = None
    adapters: list[torch.Tensor] = []
    for branch, dy, projection, trained in zip(group, gradients, projections, trains, strict=True):
        dy = rows_of(dy)
        through_b = branch.through_b(dy)
        if input_gradient:
            dx = branch.input_gradient(dy, through_b, dx, dropout)
        adapters += (
            branch.adapter_gradients(dy, rows, projection, through_b, dropout)
            if trained and branch.has_adapter
            else no_gradients(x)
        )
    if dx is None:
        return [x.new_empty(0), *adapters]
    return [dx if x.dim() == 2 else dx.view(x.shape), *adapters]


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
    x, stored, layout, _, lora_a, lora_b, scalings, probability, seed = inputs
    projections = output[len(lora_a) :]
    ctx.mark_non_differentiable(*projections)
    ctx.layout, ctx.scalings, ctx.probability = layout, scalings, probability
    ctx.counts = (len(stored), len(lora_a))
    ctx.has_seed = seed is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x, *stored, *lora_a, *lora_b, *projections, *([seed] if ctx.has_seed else [])
    )


def _autograd(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    checks.refuse_second_derivative("qlora_linears", FALLBACK)
    num_stored, count = ctx.counts
    needs = ctx.needs_input_grad
    needs_x, trains = needs[0], list(needs[4])
    saved = list(ctx.saved_tensors)
    x, seed = saved.pop(0), saved.pop() if ctx.has_seed else None
    stored, saved = saved[:num_stored], saved[num_stored:]
    lora_a, lora_b, projections = saved[:count], saved[count : 2 * count], saved[2 * count :]
    arguments = (stored, ctx.layout, [x.new_empty(0)] * count, lora_a, lora_b, ctx.scalings)
    dx, *adapters = _qlora_linears_backward_op(
        _whole(gradients, x, branches(*arguments)),
        projections,
        x,
        *arguments,
        ctx.probability,
        seed,
        needs_x,
        trains,
    )
    d_a, d_b = asked_for(adapters, trains)
    nothing = [None] * count
    return dx if needs_x else None, [None] * num_stored, None, nothing, d_a, d_b, None, None, None


_qlora_linears_op.register_autograd(_autograd, setup_context=_setup)


class _QLoRALinears(torch.autograd.Function):
    """The op without the dispatcher: the same values, gradients and saved tensors.

    autograd sees tensors outside of lists only, so x and the adapters are given beside the group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: LinearGroup,
        dropout: Dropout | None,
        x: torch.Tensor,
        *adapters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            outputs, projections = _forward(x, group.branches, dropout)
        ctx.group, ctx.dropout = group, dropout
        ctx.set_materialize_grads(False)
        seed = () if dropout is None else (dropout.seed,)
        ctx.save_for_backward(x, *group.stored, *adapters, *projections, *seed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        checks.refuse_second_derivative("qlora_linears", FALLBACK)
        group, dropout, saved = ctx.group, ctx.dropout, ctx.saved_tensors
        x, count = saved[0], len(group.branches)
        first = 1 + len(group.stored) + 2 * count
        projections = saved[first : first + count]
        _, _, needs_x, *needs = ctx.needs_input_grad
        trains = needs[:count]
        upstream = _whole(gradients, x, group.branches)
        if is_unwatched() and all(map(is_plain, upstream)):
            with below_autograd():
                dx, *adapters = _backward(
                    upstream, projections, x, group.branches, dropout, needs_x, trains
                )
        else:
            dx, *adapters = _qlora_linears_backward_op(
                upstream, projections, x, *group.arguments, *flat_dropout(dropout), needs_x, trains
            )
        d_a, d_b = asked_for(adapters, trains)
        return None, None, dx if needs_x else None, *d_a, *d_b


_qlora_linears_direct = direct(_QLoRALinears)


def _whole(
    gradients: Sequence[torch.Tensor | None], x: torch.Tensor, branches: Sequence[Branch]
) -> list[torch.Tensor]:
    """The outputs' gradients, with zeros for an output that nobody used."""
    return [
        x.new_zeros((*x.shape[:-1], branch.shape[0])) if dy is None else dy
        for dy, branch in zip(gradients, branches, strict=False)
    ]


def asked_for(
    adapters: Sequence[torch.Tensor], trains: Sequence[bool]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """(dA, dB) of each linear, None for one that is not trained."""
    d_a: list[torch.Tensor | None] = list(adapters[::2])
    d_b: list[torch.Tensor | None] = list(adapters[1::2])
    for i, needs in enumerate(trains):
        if not needs:
            d_a[i] = d_b[i] = None
    return d_a, d_b


def flat_dropout(dropout: Dropout | None) -> tuple[float, torch.Tensor | None]:
    """A dropout as an op's flat arguments have it."""
    return (0.0, None) if dropout is None else dropout


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
    linears: Sequence[FrozenLinear] | LinearGroup,
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """One output for each linear, (..., out_i) in x's dtype (autocast's where it is on).

    x (..., in) bf16, fp16 or fp32. `dropout` acts on the adapters' input, each by a mask of its
    own; pass 0 in evaluation. The seed, (1,) int64, is drawn from the device's generator unless
    given. A `LinearGroup` that is kept spares the checks of the second call. Raises
    KernelInputError.
    """
    group = LinearGroup.of(linears)
    group.check("qlora_linears", x, dropout)
    x = to_autocast_dtype(x)
    group.prepare(x)
    seed = checked_seed("qlora_linears", x, dropout, seed)
    if group.is_plain and is_unwatched() and is_plain(x):
        drop = dropout_of(dropout, seed)
        return list(_qlora_linears_direct(group, drop, x, *group.lora_a, *group.lora_b))
    return _qlora_linears_op(x, *group.arguments, float(dropout), seed)[: len(group.branches)]


def qlora_linear(
    x: torch.Tensor,
    weight: StoredWeight | torch.Tensor,
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
    if not isinstance(weight, StoredWeight):
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
        weight: StoredWeight | torch.Tensor,
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
        self._group: LinearGroup | None = None

    @staticmethod
    def from_linear(
        linear: torch.nn.Linear, rank: int, alpha: float | None = None, **options: Any
    ) -> QLoRALinear:
        """Quantizes a linear's weight to NF4 with nested scales."""
        own = cast("torch.Tensor | None", linear.bias)  # torch's stub leaves the None out
        bias = None if own is None else own.detach()
        return QLoRALinear(quantize(linear.weight.detach()), rank, alpha, bias=bias, **options)

    def is_read_by(self, linear: FrozenLinear) -> bool:
        """True if `linear` holds what this module has now."""
        adapter, own = linear.adapter, self._parameters
        return (
            adapter is not None
            and adapter.a is own["lora_a"]
            and adapter.b is own["lora_b"]
            and linear.weight is self.weight
            and linear.bias is self._buffers["bias"]
            and adapter.scaling == self.scaling
        )

    def frozen(self) -> FrozenLinear:
        """What the fused ops take."""
        return FrozenLinear(
            self.weight, self.bias, LoraAdapter(self.lora_a, self.lora_b, self.scaling)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `qlora_linear`."""
        group = kept_group(self._group, (self,))
        if group is not self._group:  # a module's __setattr__ is slow
            self._group = group
        return qlora_linears(x, group, dropout=self.dropout if self.training else 0.0)[0]


Group = TypeVar("Group", bound=LinearGroup)


def kept_group(
    group: Group | None, modules: Sequence[QLoRALinear], kind: type[Group] = LinearGroup
) -> Group:
    """`group` if it is what the modules have now, else a new one."""
    if group is not None:
        for module, linear in zip(modules, group.linears, strict=True):
            if not module.is_read_by(linear):
                break
        else:
            return group
    return kind([module.frozen() for module in modules])


class QLoRAQKV(torch.nn.Module):
    """The query, key and value projections of one x, which is read and saved once; K and V may be
    narrower (grouped heads)."""

    def __init__(self, q: QLoRALinear, k: QLoRALinear, v: QLoRALinear) -> None:
        super().__init__()
        self.q, self.k, self.v = q, k, v
        self._group: LinearGroup | None = None

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[q, k, v] of x; see `qlora_linears`."""
        dropout = self.q.dropout if self.training else 0.0
        group = kept_group(self._group, (self.q, self.k, self.v))
        if group is not self._group:
            self._group = group
        return qlora_linears(x, group, dropout=dropout)
