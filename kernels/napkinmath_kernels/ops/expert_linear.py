"""A linear of every expert over rows sorted by expert, the weights frozen (4-bit or dense), each
expert with a LoRA adapter of its own.

    y_s = x_s W_e^T + scaling * x_s A_e^T B_e^T        e the expert of row s

PEFT adapts transformers' expert stacks by making W + scaling B A in full, for every layer, and
keeping it for the backward; here neither that sum nor its gradient exists. Forward: decode the
stack into the shared buffer where it is 4-bit, one grouped product, two thin ones. Backward: the
same for dx, and dA, dB by expert. Saved: x (rows x in), x A^T (rows x r), offsets and parameters.
Temporaries: the decoded stack. FLOPs and bytes: `costs.expert_linear`.
Sources: Hu et al. 2021 (arXiv 2106.09685); peft 0.21 tuners/lora/layer.py ParamWrapper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import acts_as_gpu, choose_backend, runs_triton
from ..errors import KernelInputError
from ..weight_buffer import SHARED_BUFFER
from .eager import below_autograd, is_plain, is_unwatched, runs_eagerly
from .nf4 import QuantizedWeight, decode_into

FALLBACK = "peft's own layer (target_parameters)"
#: Ranks up to here fit one program's registers.
MAX_RANK = 256
#: Values of 2 bytes that one aligned access of 16 takes: what torch's grouped product asks of rows.
_ALIGNED = 8


@dataclass(frozen=True, eq=False)
class ExpertAdapter:
    """A LoRA adapter of each expert: a (experts, r, in) and b (experts, out, r), of any strides,
    computed in x's dtype, and what their product is scaled by."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def _grouped_product(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x_s @ weights_e (experts, width, columns) for the rows of each expert; what lies behind the
    last expert's rows is undefined on a GPU, zero elsewhere."""
    _, width, columns = weights.shape
    aligned = width % _ALIGNED == 0 and columns % _ALIGNED == 0
    if acts_as_gpu(x) and x.dtype is torch.bfloat16 and aligned:
        return torch.nn.functional.grouped_mm(x, weights, offs=offsets)
    y = torch.zeros((x.shape[0], columns), dtype=x.dtype, device=x.device)
    if x.is_meta:  # a trace of what would run: each expert's product writes into y
        return y
    for expert, (start, end) in enumerate(_bounds(offsets)):
        torch.mm(x[start:end], weights[expert], out=y[start:end])
    return y


def _bounds(offsets: torch.Tensor) -> list[tuple[int, int]]:
    ends: list[int] = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _down(
    x: torch.Tensor, factor: torch.Tensor, offsets: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """scaling * x_s @ factor_e (experts, width, r), as (rows, r)."""
    out = torch.empty((x.shape[0], factor.shape[2]), dtype=x.dtype, device=x.device)
    if runs_triton("expert_linear", x):
        from ..triton_kernels.expert_lora import expert_down

        expert_down(x, factor, offsets, out, scaling)
        return out
    for expert, (start, end) in enumerate(_bounds(offsets)):
        out[start:end] = torch.mm(x[start:end], factor[expert].to(x.dtype)).mul_(scaling)
    return out


def _add_up(
    out: torch.Tensor,
    thin: torch.Tensor,
    factor: torch.Tensor,
    offsets: torch.Tensor,
    scaling: float,
) -> None:
    """out_s += scaling * thin_s @ factor_e (experts, r, width)."""
    if runs_triton("expert_linear", out):
        from ..triton_kernels.expert_lora import expert_up

        return expert_up(thin, factor, offsets, out, scaling)
    for expert, (start, end) in enumerate(_bounds(offsets)):
        out[start:end].addmm_(thin[start:end], factor[expert].to(out.dtype), alpha=scaling)
    return None


def _write_gradient(
    out: torch.Tensor,
    thin: torch.Tensor,
    wide: torch.Tensor,
    offsets: torch.Tensor,
    scaling: float,
) -> None:
    """out_e (experts, r, width) = scaling * thin_e^T wide_e, over the rows of each expert."""
    if runs_triton("expert_linear", wide):
        from ..triton_kernels.expert_lora import expert_gradient

        return expert_gradient(thin, wide, offsets, out, scaling)
    for expert, (start, end) in enumerate(_bounds(offsets)):
        thin_rows, wide_rows = (t[start:end].to(out.dtype) for t in (thin, wide))
        out[expert].copy_(torch.mm(thin_rows.t(), wide_rows).mul_(scaling))
    return None


def _weights(
    stored: Sequence[torch.Tensor], layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The stack (experts, ., .) in `dtype`, valid until the next weight is decoded on this
    stream."""
    if len(stored) == 1:
        return stored[0].to(dtype)
    *shape, blocksize, nested_blocksize = layout
    wide = torch.float32 if dtype is torch.float64 else dtype
    out = SHARED_BUFFER.take(tuple(shape), wide, stored[0].device)
    decode_into(stored, blocksize, nested_blocksize, out)
    return out.to(dtype)


def _packed_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or not x.numel() else x.contiguous()


def _forward(
    x: torch.Tensor,
    stored: Sequence[torch.Tensor],
    layout: Sequence[int],
    transposed: bool,
    offsets: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x A^T, empty without an adapter)."""
    x, weights = _packed_rows(x), _weights(stored, layout, x.dtype)
    y = _grouped_product(x, weights if transposed else weights.transpose(1, 2), offsets)
    if a is None or b is None:
        return y, x.new_empty(0)
    projected = _down(x, a.transpose(1, 2), offsets)
    _add_up(y, projected, b.transpose(1, 2), offsets, scaling)
    return y, projected


def _backward(
    dy: torch.Tensor,
    projected: torch.Tensor,
    x: torch.Tensor,
    stored: Sequence[torch.Tensor],
    layout: Sequence[int],
    transposed: bool,
    offsets: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    input_gradient: bool,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dA, dB), empty where not asked for."""
    dy = _packed_rows(dy)
    dx, d_a, d_b = (dy.new_empty(0) for _ in range(3))
    through_b = dy.new_empty(0) if b is None else _down(dy, b, offsets, scaling)
    if input_gradient:
        weights = _weights(stored, layout, dy.dtype)
        dx = _grouped_product(dy, weights.transpose(1, 2) if transposed else weights, offsets)
        if a is not None:
            _add_up(dx, through_b, a, offsets, 1.0)
    if trains and a is not None and b is not None:
        d_a, d_b = torch.empty_like(a), torch.empty_like(b)
        _write_gradient(d_a, through_b, _packed_rows(x), offsets, 1.0)
        _write_gradient(d_b.transpose(1, 2), projected, dy, offsets, scaling)
    return dx, d_a, d_b


@torch.library.custom_op(
    "napkinmath::expert_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _expert_linear_op(
    x: torch.Tensor,
    stored: list[torch.Tensor],
    layout: list[int],
    transposed: bool,
    offsets: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(x, stored, layout, transposed, offsets, a, b, scaling)


@_expert_linear_op.register_fake
def _(
    x: torch.Tensor,
    stored: Any,
    layout: list[int],
    transposed: bool,
    offsets: Any,
    a: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, outputs = x.shape[0], layout[2] if transposed else layout[1]
    return x.new_empty((rows, outputs)), x.new_empty((0,) if a is None else (rows, a.shape[1]))


@torch.library.custom_op(
    "napkinmath::expert_linear_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _expert_linear_backward_op(
    dy: torch.Tensor,
    projected: torch.Tensor,
    x: torch.Tensor,
    stored: list[torch.Tensor],
    layout: list[int],
    transposed: bool,
    offsets: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    input_gradient: bool,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = (x, stored, layout, transposed, offsets, a, b, scaling)
    return _backward(dy, projected, *arguments, input_gradient, trains)


@_expert_linear_backward_op.register_fake
def _(
    dy: torch.Tensor, projected: Any, x: torch.Tensor, stored: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    a, b, _, input_gradient, trains = rest[-5:]
    adapter = [a, b] if trains and a is not None else [dy.new_empty(0)] * 2
    dx = x.new_empty(x.shape if input_gradient else (0,))
    return dx, *(torch.empty_like(tensor) for tensor in adapter)


def _save(ctx: Any, inputs: tuple[Any, ...], projected: torch.Tensor) -> None:
    x, stored, layout, transposed, offsets, a, b, scaling = inputs
    ctx.options = (list(layout), transposed, scaling, len(stored), a is not None)
    ctx.set_materialize_grads(False)
    adapter = () if a is None else (a, b)
    ctx.save_for_backward(x, offsets, projected, *stored, *adapter)


def _gradients(
    ctx: Any, dy: torch.Tensor | None, needs_x: bool, trains: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if dy is None:
        return None, None, None
    checks.refuse_second_derivative("expert_linear", FALLBACK)
    layout, transposed, scaling, num_stored, has_adapter = ctx.options
    x, offsets, projected, *others = ctx.saved_tensors
    stored = others[:num_stored]
    a, b = others[num_stored:] if has_adapter else (None, None)
    arguments = (x, stored, layout, transposed, offsets, a, b, scaling, needs_x, trains)
    if is_unwatched() and all(map(is_plain, (x, dy))):
        with below_autograd():
            found = _backward(dy, projected, *arguments)
    else:
        found = _expert_linear_backward_op(dy, projected, *arguments)
    dx, d_a, d_b = found
    return dx if needs_x else None, d_a if trains else None, d_b if trains else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[1])
    _save(ctx, inputs, output[1])


def _autograd(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    dx, d_a, d_b = _gradients(ctx, dy, needs[0], needs[5])
    return dx, [None] * ctx.options[3], None, None, None, d_a, d_b, None


_expert_linear_op.register_autograd(_autograd, setup_context=_setup)


class _ExpertLinear(torch.autograd.Function):
    """The op without the dispatcher: the same values, gradients and saved tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: tuple[Any, ...],
        x: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
    ) -> torch.Tensor:
        with below_autograd():
            y, projected = _forward(*inputs)
        _save(ctx, inputs, projected)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _, needs_x, trains, _ = ctx.needs_input_grad
        return None, *_gradients(ctx, gradients[0], needs_x, trains)


def _check_adapter(x: torch.Tensor, sizes: tuple[int, int, int], adapter: ExpertAdapter) -> None:
    op, (experts, outputs, inputs) = "expert_linear", sizes
    a, b = adapter.a, adapter.b
    checks.require_tensors(op, FALLBACK, a=a, b=b)
    checks.require_dtype(op, "a", a, FALLBACK)
    checks.require_dtype(op, "b", b, FALLBACK, (a.dtype,))
    checks.require_same_device(op, FALLBACK, x=x, a=a, b=b)
    rank = a.shape[1] if a.dim() == 3 else 0
    checks.require(
        0 < rank <= MAX_RANK
        and tuple(a.shape) == (experts, rank, inputs)
        and tuple(b.shape) == (experts, outputs, rank),
        op,
        f"adapter a {tuple(a.shape)}, b {tuple(b.shape)}",
        f"({experts}, r, {inputs}) and ({experts}, {outputs}, r), r 1 to {MAX_RANK}",
        FALLBACK,
    )
    checks.require(
        checks.is_number(adapter.scaling),
        op,
        f"scaling {adapter.scaling!r}",
        "a finite number",
        FALLBACK,
    )
    if a.requires_grad != b.requires_grad:
        given = "one adapter matrix trained without the other"
        raise KernelInputError(op, given, "both or neither", FALLBACK)


def _check(
    x: torch.Tensor,
    weight: QuantizedWeight | torch.Tensor,
    offsets: torch.Tensor,
    adapter: ExpertAdapter | None,
    transposed: bool,
) -> None:
    op = "expert_linear"
    checks.require_tensors(op, FALLBACK, x=x, offsets=offsets)
    checks.require_dtype(op, "x", x, FALLBACK)
    choose_backend(op, x)
    shape = tuple(weight.shape)
    if not isinstance(weight, QuantizedWeight):
        checks.require_tensors(op, FALLBACK, weight=weight)
        checks.require_dtype(op, "weight", weight, FALLBACK)
        frozen = not weight.requires_grad
        checks.require(frozen, op, "a stack that requires a gradient", "a frozen one", FALLBACK)
    fits = x.dim() == 2 and len(shape) == 3 and shape[1 if transposed else 2] == x.shape[1]
    accepted = (
        "x (rows, in), (experts, in, out)" if transposed else "x (rows, in), (experts, out, in)"
    )
    checks.require(fits, op, f"x {tuple(x.shape)}, stack {shape}", accepted, FALLBACK)
    experts, first, second = shape
    is_offsets = offsets.dtype is torch.int32 and tuple(offsets.shape) == (experts,)
    given = f"offsets {offsets.dtype} of shape {tuple(offsets.shape)}"
    checks.require(is_offsets, op, given, f"int32 of shape ({experts},)", FALLBACK)
    stored = weight.packed if isinstance(weight, QuantizedWeight) else weight
    checks.require_same_device(op, FALLBACK, x=x, weight=stored, offsets=offsets)
    if adapter is not None:
        outputs, inputs = (second, first) if transposed else (first, second)
        _check_adapter(x, (experts, outputs, inputs), adapter)


def expert_linear(
    x: torch.Tensor,
    weight: QuantizedWeight | torch.Tensor,
    offsets: torch.Tensor,
    adapter: ExpertAdapter | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Each row of x (rows, in) through its expert's linear: (rows, out) in x's dtype (autocast's
    where it is on).

    `weight` (experts, out, in), or (experts, in, out) if `transposed`, is frozen; `offsets`
    (experts,) int32 are the ends of the experts' rows, in order. Rows behind the last end belong
    to no expert: what they give is undefined. Raises KernelInputError.
    """
    _check(x, weight, offsets, adapter, transposed)
    x = to_autocast_dtype(x)
    four_bit = isinstance(weight, QuantizedWeight)
    stored = weight.tensors() if isinstance(weight, QuantizedWeight) else [weight]
    blocks = (weight.blocksize, weight.nested_blocksize) if four_bit else (0, 0)
    layout = [*weight.shape, *blocks]
    stored = [tensor.contiguous() for tensor in stored] if four_bit else stored
    a, b, scaling = (
        (None, None, 1.0) if adapter is None else (adapter.a, adapter.b, adapter.scaling)
    )
    inputs = (x, stored, layout, transposed, offsets, a, b, float(scaling))
    if runs_eagerly((x, *stored, *(tensor for tensor in (a, b) if tensor is not None))):
        return _ExpertLinear.apply(inputs, x, a, b)
    return _expert_linear_op(*inputs)[0]
