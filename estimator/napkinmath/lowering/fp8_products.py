"""Linears whose products run in FP8: activations, weights and gradients are cast for each product,
with a scale a tensor, a row or a block.

What is kept for the backward is the 16-bit input; casts are made again: one pass for the largest
absolute value, one for the cast, and a copy for each operand laid out the other way. Compiled, the
first pass is part of the kernel before, the cast writes both layouts, the gradient is cast once for
its two products, and linears that read one input share its cast (inductor's fusion and common
subexpressions). A row has its scale along the dimension that the product sums over, so the backward
casts copies of the 16-bit operands laid out the other way (torchao testing/training/
roofline_utils.py get_tensor_memory_traffic_ovhd_s, rowwise). Sources: torchao 0.18 float8/float8_linear.py matmul_with_hp_or_float8_args and
float8/float8_ops.py preprocess_addmm (tensor-wise); prototype/blockwise_fp8_training/linear.py
fp8_blockwise_mm (DeepSeek-V3's blocks, arXiv 2412.19437).
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP8_E4M3, FP8_E5M2, FP32, DType
from napkinmath.base.expr import Size, ceil_div, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Tensor, Value, Weight, allocs, frees
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import add_bias, cast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.costs import Cost


class Casts:
    """Tensors in FP8 with their scales, for one linear: how many scales there are, and which
    operands are laid out anew."""

    def __init__(self, t: Tape, block: int) -> None:
        self.t, self.block, self.rows = t, block, t.policy.rule.fp8_rows
        self.compiled = t.compiles and not block
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
        scales: tuple[Size, ...] = (1,)
        if self.block:
            scales = (ceil_div(rows, groups[0]), ceil_div(columns, groups[1]))
        elif self.rows:
            scales = (rows,)
        self.made.append(self.tensor(f"{name} in FP8", axes, dtype))
        self.made.append(self.tensor(f"scales of {name}", scales, FP32))
        if not (self.compiled and made):
            # a block's largest value is found where it is cast
            passes = 1 if self.block or self.compiled else 2
            self.moved = self.moved + rows * columns * (passes * (source.bits // 8) + 1)
            self.launches += passes

    def turned(self, name: str, axes: tuple[Size, Size], source: DType) -> Tensor:
        """The cast of a 16-bit copy laid out the other way, whose rows have the scales; gives the
        copy."""
        self.moved = self.moved + 2 * axes[0] * axes[1] * (source.bits // 8)
        self.launches += 1
        self.cast(name, (axes[1], axes[0]), source)
        return self.tensor(f"{name} in 16 bits, transposed", axes, source)

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
    out = Value(tensor, axes, dtype, x.requires_grad or w.trainable)
    casts = Casts(t, block)
    casts.cast("input", (rows, inputs), dtype, groups=(1, block), made=read_before)
    casts.cast("weight", (outputs, inputs), w.tensor.dtype, groups=(block, block))
    back = _Backward(t, x, w, rows, block)
    if out.requires_grad:
        back.run(read_before=read_before)
    t.append(
        "FP8 linear",
        (x, w.value),
        (out,),
        forward=(*allocs(*casts.made, tensor), *frees(*casts.made)),
        saves=(x.tensor,),
        costs=(Move(casts.moved, casts.launches), Gemm(rows, outputs, inputs, FP8_E4M3)),
        backward=tuple(back.steps),
        gradients=back.gradients,
        backward_costs=back.costs,
    )
    if bias is None:
        return out
    return add_bias(t, out, cast(t, bias, dtype))


class _Backward:
    """The gradient of x, then of the weight: every cast lives until both are there, a transposed
    copy as long as its product."""

    def __init__(self, t: Tape, x: Value, w: Weight, rows: Size, block: int) -> None:
        self.t, self.x, self.w, self.rows = t, x, w, rows
        self.outputs, self.inputs = w.axes
        self.casts = Casts(t, block)
        self.block, self.rows_scaled = block, t.policy.rule.fp8_rows
        self.narrow = FP8_E4M3 if block or self.rows_scaled else FP8_E5M2
        self.gradients: list[Gradient] = []
        self.steps: list[tuple[str, Tensor]] = []
        self.costs: list[Cost] = []

    def run(self, *, read_before: bool) -> None:
        """Records both; `read_before`: another linear has cast x already."""
        casts, block, (outputs, inputs) = self.casts, self.block, self.w.axes
        groups = (1, block)
        casts.cast("gradient", (self.rows, outputs), self.x.dtype, dtype=self.narrow, groups=groups)
        copies: list[Tensor] = []
        if self.rows_scaled:
            copies.append(casts.turned("weight", (outputs, inputs), self.x.dtype))
        else:
            casts.cast("weight", (outputs, inputs), self.w.tensor.dtype, groups=(block, block))
        self.steps += (*allocs(*copies, *casts.made), *frees(*copies))
        if self.x.requires_grad:
            self._of_input()
        if self.w.trainable:
            self._of_weight(read_before=read_before)
        else:
            self.steps += frees(*casts.made)
        self.costs.insert(0, Move(casts.moved, casts.launches))

    def _of_input(self) -> None:
        size = (self.outputs, self.inputs)
        whole = not self.block and not self.rows_scaled
        laid = [self.casts.transpose("weight", size)] if whole else []
        made = self.t.gradient_of(self.x)
        self.gradients.append(Gradient(self.x, made))
        self.steps += (*allocs(*laid, made), *frees(*laid))
        self.costs.append(Gemm(self.rows, self.inputs, self.outputs, FP8_E4M3))

    def _of_weight(self, *, read_before: bool) -> None:
        t, w, casts, dtype, block = self.t, self.w, self.casts, self.x.dtype, self.block
        first, turned = len(casts.made), (self.outputs, self.rows)
        own_groups, groups = (1, block), (block, 1)
        again = "gradient again"
        laid: list[Tensor] = []
        if self.rows_scaled:
            laid.append(casts.turned(again, (self.rows, self.outputs), dtype))
            if not (casts.compiled and read_before):
                laid.append(casts.turned("input", (self.rows, self.inputs), dtype))
        else:
            casts.cast(again, turned, dtype, dtype=self.narrow, groups=own_groups, made=True)
            casts.cast("input", (self.rows, self.inputs), dtype, groups=groups, made=read_before)
        if not block and not self.rows_scaled:
            laid.append(casts.transpose(again, turned))
            laid.append(casts.transpose("input", (self.rows, self.inputs), made=read_before))
        own = made = t.gradient_of(w.value)
        self.costs.append(Gemm(self.outputs, self.inputs, self.rows, FP8_E4M3))
        if w.tensor.dtype is not dtype:
            own = t.tensor("weight's gradient before its cast", w.axes, dtype, Role.GRADIENTS)
            self.costs.append(Move(3 * traffic(w.value)))
        self.gradients.append(Gradient(w.value, made))
        self.steps += (*allocs(*casts.made[first:], *laid, own), *frees(*laid, *casts.made))
        self.steps += (*allocs(made), *frees(own)) if own is not made else ()
