"""What the update of one parameter costs: the bytes its kernels move, each tensor in its own stored
type, and the products it runs.

A kernel reads each tensor it names once and writes each result once. Where an fp32 master is what is
updated, the 16-bit gradient is cast before and the 16-bit parameter written after.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size, ceil_div
from napkinmath.catalog.optimizer_states import Temporary
from napkinmath.catalog.optimizers import applied_to
from napkinmath.ir.costs import Gemm, Move

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.base.dtypes import DType
    from napkinmath.catalog.optimizer_states import Optimizer
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Weight
    from napkinmath.ir.stack import Stack

    Elements = Callable[[tuple[Size, ...]], Size] | None
    Operand = tuple[str, DType, Elements]  # (tensor, type, elements of it)

# Kernels over lists of tensors load four values a thread (aten/src/ATen/native/cuda/ForeachFunctors.cuh
# kILP): 8 bytes of 16-bit ones, where torch's kernels of one tensor load 16. Of 537 million bf16
# parameters AdamW by foreach takes 7.3 ms on an H200, and 12.6 of fp32 ones, twice the bytes; its
# passes alone add up to the same (benchmarks/results/h200/hostpace.jsonl; one machine).
_NARROW_LOADS = 0.86
_WEIGHT, _GRADIENT, _MASTER = "weight", "gradient", "master"


def update_costs(
    row: Optimizer, weight: Weight, stack: Stack, sums: DType | None = None
) -> list[Cost]:
    """The kernels and products of one parameter's update; an optimizer with copies of its own reads
    gradients in the type of the trainer's `sums`, if it keeps some."""
    row, stored = applied_to(row, weight.axes, weight.kind), weight.tensor.dtype
    own = row.master_of(stored)
    updated = stored if own or not stack.optimizer.master_weights else FP32
    bits, launches = _bits(_operands(row, updated, own, sums or updated), row)
    moved = _total(bits, weight)
    if updated is not stored:
        moved += ceil_div(weight.elements * _master_bits(stack, stored), 8)
    narrow = row.multi_tensor and updated.bits == 16
    reach = _NARROW_LOADS if narrow else 1.0
    found: list[Cost] = [Move(moved, 1 if row.multi_tensor else launches, reach=reach)]
    if len(weight.axes) == 2:
        for product in row.products:
            sides = product.sides(weight.axes)
            if sides is not None:
                found += [Gemm(*sides, product.dtype or updated)] * product.times
    return found


def one_pass_bits(row: Optimizer) -> int:
    """Bits that one vectorised pass in fp32 moves for each element: the gradient read, the
    parameter and each state read and written (DeepSpeed csrc/includes/cpu_adam.h Step_AVX, torch
    aten/src/ATen/native/cpu/FusedAdamKernel.cpp)."""
    return FP32.bits * (1 + 2 * (1 + num_states(row)))


def num_states(row: Optimizer) -> int:
    """States of an optimizer as long as the parameter."""
    return sum(1 for state in row.states if state.elements is None and not state.below)


def _master_bits(stack: Stack, stored: DType) -> int:
    """Bits that casts between a parameter and its fp32 master move, for each element: the gradient
    (flattened first, cast, or summed in fp32 already) and the new parameter."""
    flattened = 2 * stored.bits if stack.optimizer.casts_gradients else 0
    gradient = 0 if stack.optimizer.main_gradients else flattened + stored.bits + FP32.bits
    return gradient + FP32.bits + stored.bits


def _total(bits: dict[Elements, int], weight: Weight) -> Size:
    moved: Size = 0
    for elements, each in bits.items():
        count = elements(weight.axes) if elements else weight.elements
        moved = moved + ceil_div(count * each, 8)
    return moved


def _bits(operands: dict[str, Operand], row: Optimizer) -> tuple[dict[Elements, int], int]:
    """(bits moved for each element, by what counts the elements; kernels launched)."""
    launches = 0
    found: dict[Elements, int] = {}
    for written, read in _kernels(row):
        ends = [[operands[name][0] for name in names] for names in (written, read)]
        if written != read and ends[0] == ends[1]:
            continue  # a cast to the type that it has
        launches += 1
        for _, dtype, elements in {operands[n][0]: operands[n] for n in read}.values():
            found[elements] = found.get(elements, 0) + dtype.bits
        for name in written:
            _, dtype, elements = operands[name]
            found[elements] = found.get(elements, 0) + dtype.bits
    return found, launches


def _kernels(row: Optimizer) -> list[tuple[list[str], list[str]]]:
    """(written, read) names of each kernel; one that takes everything where a row lists none."""
    if row.kernels:
        return [(_names(left), _names(right)) for left, right in map(_sides, row.kernels)]
    states = [s.name for s in row.states if not (s.below or s.shared)]
    return [([_WEIGHT, *states], [_WEIGHT, _GRADIENT, *states])]


def _sides(kernel: str) -> tuple[str, str]:
    left, _, right = kernel.partition("=")
    return left, right


def _names(side: str) -> list[str]:
    return [name.strip() for name in side.split(",") if name.strip()]


def _operands(
    row: Optimizer, updated: DType, master: DType | None, sums: DType
) -> dict[str, Operand]:
    """Every tensor that the kernels may name, with a `master` of the optimizer's own. A small parameter's
    states and tables that all share are left out: the large form is priced."""
    found: dict[str, Operand] = {
        _WEIGHT: (_WEIGHT, updated, None),
        _GRADIENT: (_GRADIENT, sums if master else updated, None),
    }
    if master:
        found[_MASTER] = (_MASTER, master, None)
    for state in row.states:
        if not (state.below or state.shared):
            found[state.name] = (state.name, state.dtype or updated, state.elements)
    for name in row.foreach:
        found[name] = (name, row.foreach_dtype or updated, None)
    for made in row.script:
        if isinstance(made, Temporary) and made.name not in found:
            source = found[made.cast_of] if made.cast_of else None
            own = (made.name, made.dtype or updated, made.elements)
            found[made.name] = source if source and source[1] is own[1] else own
    return found
