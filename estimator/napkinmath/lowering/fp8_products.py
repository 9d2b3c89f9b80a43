"""Linears whose products run in FP8: activations, weights and gradients are cast for each product,
with a scale a tensor or a block.

What is kept for the backward is the 16-bit input; casts are made again: one pass for the largest
absolute value, one for the cast, and a copy for each operand laid out the other way. Compiled, the
first pass is part of the kernel before, the cast writes both layouts, the gradient is cast once for
its two products, and linears that read one input share its cast (inductor's fusion and common
subexpressions). Sources: torchao 0.18 float8/float8_linear.py matmul_with_hp_or_float8_args and
float8/float8_ops.py preprocess_addmm (tensor-wise); prototype/blockwise_fp8_training/linear.py
fp8_blockwise_mm (DeepSeek-V3's blocks, arXiv 2412.19437).
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP8_E4M3, FP8_E5M2, FP32, DType
from napkinmath.base.expr import Size, ceil_div, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import add, cast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.costs import Cost


class Casts:
    """Tensors in FP8 with their scales, for one linear: how many scales there are, and which
    operands are laid out anew."""

    def __init__(self, t: Tape, block: int) -> None:
        self.t, self.block = t, block
        self.compiled = t.policy.config.compile and not block
        self.made: list[Tensor] = []
        self.moved: Size = 0
        self.launches = 0

    def cast(
        self,
        name: str,
        axes: tuple[Size, Size],
        source: DType,
        *,
        dtype: DType = FP8_E4M3,
        groups: tuple[int, int] = (1, 1),
        made: bool = False,
    ) -> None:
        """A cast of a matrix; `groups` are the rows and columns that share a scale (of the whole
        tensor without blocks).

        `made`: compiled, it is there from another product.
        """
        rows, columns = axes
        scales: tuple[Size, ...] = (
            (ceil_div(rows, groups[0]), ceil_div(columns, groups[1])) if self.block else (1,)
        )
        self.made += [
            self.tensor(f"{name} in FP8", axes, dtype),
            self.tensor(f"scales of {name}", scales, FP32),
        ]
        if self.compiled and made:
            return
        passes = (
            1 if self.block or self.compiled else 2
        )  # a block's largest value is found where it is cast
        self.moved = self.moved + rows * columns * (passes * (source.bits // 8) + 1)
        self.launches += passes

    def tensor(self, name: str, axes: tuple[Size, ...], dtype: DType) -> Tensor:
        """A temporary."""
        return self.t.tensor(name, axes, dtype, Role.WORKSPACE)

    def transpose(self, name: str, axes: tuple[Size, Size], *, made: bool = False) -> Tensor:
        """A copy laid out the other way, which a tensor-wise product asks of some operands;
        block-wise casts write it at once."""
        if not (self.compiled and made):
            self.moved = self.moved + (1 if self.compiled else 2) * axes[0] * axes[1]
            self.launches += 0 if self.compiled else 1
        return self.tensor(f"{name} in FP8, transposed", axes, FP8_E4M3)


def fp8_linear(
    t: Tape, x: Value, w: Weight, bias: Value | None, *, role: Role, block: int
) -> Value:
    """y = x·W^T with both cast for the product; `block` is the side of a weight's blocks, 0 for one
    scale a tensor."""
    read_before = id(x) in t.cast_once
    t.cast_once[id(x)] = x
    x = cast(t, x, t.policy.autocast or BF16)
    dtype, rows, (outputs, inputs) = x.dtype, product(x.axes[:-1]), w.axes
    axes = (*x.axes[:-1], outputs)
    tensor = t.tensor("output", axes, dtype, role)
    needs = x.requires_grad or w.trainable
    out = Value(tensor, axes, dtype, needs)
    forward = Casts(t, block)
    forward.cast("input", (rows, inputs), dtype, groups=(1, block), made=read_before)
    forward.cast("weight", (outputs, inputs), w.tensor.dtype, groups=(block, block))
    steps = (
        *((ALLOC, c) for c in forward.made),
        (ALLOC, tensor),
        *((FREE, c) for c in forward.made),
    )
    costs = (Move(forward.moved, forward.launches), Gemm(rows, outputs, inputs, FP8_E4M3))
    if not needs:
        t.append("FP8 linear", (x, w.value), (out,), forward=steps, costs=costs)
    else:
        gradients, backward, back = _backward(t, x, w, rows, block, read_before=read_before)
        t.append(
            "FP8 linear",
            (x, w.value),
            (out,),
            forward=steps,
            saves=(x.tensor,),
            costs=costs,
            backward=backward,
            gradients=gradients,
            backward_costs=back,
        )
    if bias is None:
        return out
    return add(
        t,
        out,
        cast(t, Value(bias.tensor, axes, bias.dtype, bias.requires_grad, bias.weight), dtype),
    )


def _backward(
    t: Tape, x: Value, w: Weight, rows: Size, block: int, *, read_before: bool
) -> tuple[list[Gradient], tuple[tuple[str, Tensor], ...], tuple[Cost, ...]]:
    """The gradient of x, then of the weight: every cast lives until both are there, a transposed
    copy as long as its product."""
    (outputs, inputs), dtype = w.axes, x.dtype
    casts = Casts(t, block)
    casts.cast(
        "gradient", (rows, outputs), dtype, dtype=FP8_E4M3 if block else FP8_E5M2, groups=(1, block)
    )
    casts.cast("weight", (outputs, inputs), w.tensor.dtype, groups=(block, block))
    steps: list[tuple[str, Tensor]] = [(ALLOC, c) for c in casts.made]
    costs: list[Cost] = []
    gradients: list[Gradient] = []
    if x.requires_grad:
        laid = [] if block else [casts.transpose("weight", (outputs, inputs))]
        gradients.append(Gradient(x, t.gradient_of(x)))
        steps += [
            *((ALLOC, c) for c in laid),
            (ALLOC, gradients[-1].tensor),
            *((FREE, c) for c in laid),
        ]  # type: ignore[list-item]
        costs.append(Gemm(rows, inputs, outputs, FP8_E4M3))
    if w.trainable:
        first = len(casts.made)
        casts.cast(
            "gradient again",
            (outputs, rows),
            dtype,
            dtype=FP8_E4M3 if block else FP8_E5M2,
            groups=(1, block),
            made=True,
        )
        casts.cast("input", (rows, inputs), dtype, groups=(block, 1), made=read_before)
        laid = (
            []
            if block
            else [
                casts.transpose("gradient again", (outputs, rows)),
                casts.transpose("input", (rows, inputs), made=read_before),
            ]
        )
        own = t.tensor("weight's gradient before its cast", w.axes, dtype, Role.GRADIENTS)
        gradient = t.gradient_of(w.value)
        narrow = w.tensor.dtype is not dtype
        gradients.append(Gradient(w.value, gradient))
        steps += [(ALLOC, c) for c in (*casts.made[first:], *laid, own if narrow else gradient)]
        steps += [(FREE, c) for c in laid]
        steps += [(FREE, c) for c in casts.made]
        steps += [(ALLOC, gradient), (FREE, own)] if narrow else []
        costs += [
            Gemm(outputs, inputs, rows, FP8_E4M3),
            *([Move(3 * traffic(w.value))] if narrow else []),
        ]
    else:
        steps += [(FREE, c) for c in casts.made]
    return gradients, tuple(steps), (Move(casts.moved, casts.launches), *costs)
