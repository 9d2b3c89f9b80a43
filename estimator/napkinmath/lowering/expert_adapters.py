"""LoRA on a parameter itself: how PEFT adapts experts and routers that transformers 5 no longer
keeps as linears.

The adapted weight W + scaling · B·A exists in full, in W's type, while it is used and, kept for the
backward, until then; its gradient is as large. Source: peft 0.21 tuners/lora/layer.py ParamWrapper,
utils/transformers_weight_conversion.py. Our kernels make thin products of each expert's rows
instead: kernels/napkinmath_kernels/ops/expert_linear.py, patching/experts.py.
"""

from __future__ import annotations

from napkinmath.base.expr import Size, ceil_div
from napkinmath.catalog.adapter_kernels import FusedLinear, expert_linear
from napkinmath.ir.costs import Dequantize, Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.tape import Scope, Tape
from napkinmath.lowering.adapters import lora_weight
from napkinmath.lowering.packed_parameters import read_as, unpacked_parameter
from napkinmath.lowering.patching import scratch
from napkinmath.ops.elementwise import add, cast, scale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType


def adapted_experts(
    t: Tape, frame: Scope, weight: Weight, *, fused: int, transposed: bool
) -> tuple[Value, Value]:
    """Low-rank factors of an expert stack (e, out, in) in the stack's type; `fused` projections
    share the stack, each with its rank.

    Registering the parametrization computes the adapted weight once for nothing.
    """
    experts, outputs, inputs = _sizes(weight, transposed)
    a, b, rank = _matrices(t, weight, fused=fused, transposed=transposed)
    if runs_thin(t):
        return b, a
    dtype = read_as(t, weight)
    right = cast(t, t.view(b, (experts, outputs, rank), copies_gradient=True), dtype)
    left = cast(t, t.view(a, (experts, rank, inputs)), dtype)
    frame.local(left, right)
    whole = unpacked_parameter(t, weight)
    unused = t.tensor("adapted weight at registration", weight.axes, dtype, Role.WORKSPACE)
    t.append(
        "baddbmm",
        (whole, right, left),
        (),
        forward=((ALLOC, unused), (FREE, unused)),
        costs=_costs(weight, rank, dtype),
    )
    return right, left


def runs_thin(t: Tape) -> bool:
    """Whether a patch makes thin products of each expert's rows and never the adapted weight."""
    patch = t.policy.patch
    return patch is not None and patch.adapters and not patch.adapters_only


def _sizes(weight: Weight, transposed: bool) -> tuple[Size, Size, Size]:
    """(experts, outputs, inputs)."""
    experts, first, second = weight.axes
    return (experts, second, first) if transposed else (experts, first, second)


def _matrices(
    t: Tape, weight: Weight, *, fused: int, transposed: bool
) -> tuple[Value, Value, Size]:
    """(A, B, rank) as PEFT stores them: A (experts · rank, in), B (out, experts · rank)."""
    assert t.policy.adapter is not None
    experts, outputs, inputs = _sizes(weight, transposed)
    rank = t.policy.adapter.rank * fused
    a = lora_weight(t, f"{weight.tensor.name}.lora_A", (experts * rank, inputs))
    return a, lora_weight(t, f"{weight.tensor.name}.lora_B", (outputs, experts * rank)), rank


def thin_products(
    t: Tape,
    x: Value,
    weight: Weight,
    pair: tuple[Value, Value],
    offsets: Value,
    outputs: Size,
    *,
    fused: int,
) -> Value:
    """The grouped product of a frozen stack, and the adapters' thin ones of the same rows: keeps x,
    x A^T and the offsets; x is in the stack's type, or in autocast's."""
    b, a = pair
    experts = weight.axes[0]
    x = cast(t, x, t.policy.autocast or read_as(t, weight))
    assert t.policy.adapter is not None
    (rows, inputs), dtype, rank = x.axes, x.dtype, t.policy.adapter.rank * fused
    shape = FusedLinear(outputs=outputs, inputs=inputs, rank=rank)
    cost = expert_linear(rows, experts, shape, dtype, adapter_dtype=b.dtype)
    kept = [t.tensor(new.name, new.axes, new.dtype) for new in cost.new]
    before, after = scratch(t, "gradient through B", cost.backward_temporary)
    fmt, packed = t.policy.format, 0
    unpack: list[Dequantize] = []
    if weight.constants and fmt is not None:  # decoded whole, scales in the same launch
        packed = ceil_div(weight.elements * dtype.bits, 8)
        unpack = [Dequantize(fmt.dequantize_kernel, weight.elements, fmt.bits, dtype)]
    made_whole, gone = scratch(t, "unpacked stack", packed)
    again = (made_whole, gone) if x.requires_grad else ((), ())
    out = Value(t.tensor("expert output", (rows, outputs), dtype), (rows, outputs), dtype, True)
    given = [value for value in (x, a, b) if value.requires_grad]
    gradients = [Gradient(value, t.gradient_of(value)) for value in given]
    made = [(ALLOC, gradient.tensor) for gradient in gradients if gradient.tensor is not None]
    each = ceil_div(rows, experts)
    thin = [Gemm(each, rank, inputs, dtype, experts), Gemm(each, outputs, rank, dtype, experts)]
    back = [Gemm(each, rank, outputs, dtype, experts), Gemm(each, inputs, rank, dtype, experts)]
    of_pair = [Gemm(rank, inputs, each, dtype, experts), Gemm(outputs, rank, each, dtype, experts)]
    base = [Gemm(each, inputs, outputs, dtype, experts)] * x.requires_grad
    t.append(
        "experts with adapters",
        (x, weight.value, a, b, offsets),
        (out,),
        forward=(*made_whole, (ALLOC, out.tensor), *((ALLOC, tensor) for tensor in kept), *gone),
        saves=(x.tensor, *kept, offsets.tensor),
        costs=(*unpack, Gemm(each, outputs, inputs, dtype, experts), *thin),
        backward=(*before, *again[0], *made, *again[1], *after),
        gradients=gradients,
        backward_costs=(*unpack * x.requires_grad, *base, *back[: 1 + x.requires_grad], *of_pair),
    )
    for tensor in kept:
        t.last_use[tensor] = len(t.ops) - 1
    return out


def fold(t: Tape, weight: Weight, right: Value, left: Value) -> Value:
    """`baddbmm`: the adapted weight as a new tensor; keeps both factors."""
    whole = unpacked_parameter(t, weight)
    dtype, costs = whole.dtype, _costs(weight, right.axes[-1], whole.dtype)
    out = Value(t.tensor("adapted weight", weight.axes, dtype), weight.axes, dtype, True)
    backward: list[tuple[str, Tensor]] = []
    gradients: list[Gradient] = []
    for factor in (right, left):
        product = t.tensor("product", factor.axes, factor.dtype, Role.WORKSPACE)
        scaled = t.gradient_of(factor)
        backward += [(ALLOC, product), (ALLOC, scaled), (FREE, product)]
        gradients.append(Gradient(factor, scaled))
    t.append(
        "baddbmm",
        (whole, right, left),
        (out,),
        forward=((ALLOC, out.tensor),),
        saves=(right.tensor, left.tensor),
        costs=costs,
        backward=tuple(backward),
        gradients=gradients,
        backward_costs=costs * 2,
    )
    return out


def _costs(weight: Weight, rank: Size, dtype: DType) -> tuple[Gemm | Move, ...]:
    experts, outputs, inputs = weight.axes
    nbytes = ceil_div(weight.elements * dtype.bits, 8)
    return Gemm(outputs, inputs, rank, dtype, experts), Move(nbytes)


def adapted_matrix(t: Tape, weight: Weight) -> Value:
    """A 2-D parameter (a router) plus scaling · B·A, made in the adapter's type, then cast and
    added; added once more at registration."""
    assert t.policy.adapter is not None
    outputs, inputs = weight.axes
    rank = t.policy.adapter.rank
    a, b = (
        lora_weight(t, "lora_A.weight", (rank, inputs)),
        lora_weight(t, "lora_B.weight", (outputs, rank)),
    )
    product = t.op(
        "B A",
        (b, a),
        weight.axes,
        a.dtype,
        saves=(a, b),
        gradients=("like", "like"),
        costs=(Gemm(outputs, inputs, rank, a.dtype),),
        backward_costs=(Gemm(outputs, rank, inputs, a.dtype), Gemm(rank, inputs, outputs, a.dtype)),
    )
    delta = cast(t, scale(t, product), weight.tensor.dtype)
    unused = t.tensor(
        "adapted weight at registration", weight.axes, weight.tensor.dtype, Role.WORKSPACE
    )
    t.append(
        "add",
        (weight.value, delta),
        (),
        forward=((ALLOC, unused), (FREE, unused)),
        costs=(Move(3 * traffic(delta)),),
    )
    return add(t, weight.value, delta)
