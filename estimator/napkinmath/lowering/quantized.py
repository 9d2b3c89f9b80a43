"""Linears over packed weights: what each forward and backward unpacks.

The formats are rows of catalog/quantization.py; this file is how any of them is multiplied.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP16, FP32, DType
from napkinmath.base.expr import product
from napkinmath.ir.costs import Dequantize, Gemm
from napkinmath.ir.ledger import ALLOC, Gradient, Role, Tensor, Value, Weight, allocs, frees
from napkinmath.ir.weight_format import WeightFormat
from napkinmath.ops.elementwise import add, cast
from napkinmath.ops.matmul import add_bias_apart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.stack import Stack
    from napkinmath.ir.tape import Tape


def quantized_linear(
    t: Tape, fmt: WeightFormat, x: Value, w: Weight, bias: Value | None, *, role: Role
) -> Value:
    """y = x·W^T with W unpacked into the compute type for the product, forward and again
    backward; x is not kept, unless the format or the stack does."""
    if fmt.multiplies_integers and t.policy.stack.quantizer.int8_by_columns:
        from napkinmath.lowering.int8_by_columns import int8_linear_by_columns

        return int8_linear_by_columns(t, fmt, x, w, bias, role=role)
    if fmt.multiplies_integers:
        from napkinmath.lowering.int8_products import int8_linear

        return int8_linear(t, fmt, x, w, bias, role=role)
    if fmt.multiplies_fp8:
        from napkinmath.lowering.fp8_weights import fp8_weight_linear

        return fp8_weight_linear(t, fmt, x, w, bias, role=role)
    given, compute = x.dtype, t.policy.product_dtype
    if t.policy.autocast is not None or given is not compute:
        x = cast(t, x, compute)
    out = _product(t, fmt, x, w, role)
    if x in t.turned and bias is not None and not bias.requires_grad:
        add_bias_apart(t)
    if bias is not None and bias.requires_grad:  # a frozen bias is added by the product itself
        out = add(t, out, Value(bias.tensor, out.axes, compute, True))
    # Linear4bit.forward returns the type it was given, under autocast too, and holds its cast of the
    # input until it has returned (bitsandbytes 0.50 nn/modules.py)
    out = cast(t, out, given)
    t.touch(x.tensor)
    return out


def _product(t: Tape, fmt: WeightFormat, x: Value, w: Weight, role: Role) -> Value:
    """The product in the type of x as one node."""
    compute, rows, (outputs, inputs) = x.dtype, product(x.axes[:-1]), w.axes
    axes = (*x.axes[:-1], outputs)
    out = Value(t.tensor("output", axes, compute, role), axes, compute, x.requires_grad)
    temporaries = unpacked(t, fmt, w, compute)
    unpack = Dequantize(decoder(fmt, t.policy.stack), w.elements, fmt.bits, compute)
    made = t.gradient_of(x) if x.requires_grad else None
    keeps = x.requires_grad and (fmt.saves_input or t.policy.stack.quantizer.keeps_input)
    again, gone = _unpacked_again(t, fmt, w, compute, temporaries)
    t.append(
        f"{fmt.name} linear",
        (x, w.value),
        (out,),
        forward=(*allocs(*temporaries, out.tensor), *frees(*temporaries)),
        costs=(unpack, Gemm(rows, outputs, inputs, compute)),
        saves=(x.tensor,) if keeps else (),
        backward=(*again, (ALLOC, made), *gone) if made is not None else (),
        gradients=(Gradient(x, made),) if made is not None else (),
        backward_costs=(unpack, Gemm(rows, inputs, outputs, compute)),
    )
    return out


def _unpacked_again(
    t: Tape, fmt: WeightFormat, w: Weight, compute: DType, temporaries: list[Tensor]
) -> tuple[Steps, Steps]:
    """What the backward unpacks: into the type that the weight was quantized from, then into that
    of the product."""
    stored = t.policy.compute_dtype
    if stored is compute or not fmt.unpacks_whole:
        return allocs(*temporaries), frees(*temporaries)
    *scales, whole = unpacked(t, fmt, w, stored)
    wide = t.tensor("unpacked weight", w.axes, compute, Role.WORKSPACE)
    return (*allocs(*scales, whole), *frees(*scales), *allocs(wide), *frees(whole)), frees(wide)


def unpacked(
    t: Tape, fmt: WeightFormat, w: Weight, compute: DType, *, whole: bool = False
) -> list[Tensor]:
    """What exists while a weight is unpacked: nested scales in fp32, before and after adding
    the offset, then the weight."""
    made: list[Tensor] = []
    if fmt.double_quant:
        made.append(t.tensor("scales in fp32", (fmt.groups(w.axes),), FP32, Role.WORKSPACE))
    if fmt.unpacks_whole or whole:
        made.append(t.tensor("unpacked weight", w.axes, compute, Role.WORKSPACE))
        if t.policy.stack.quantizer.unpacks_by_half:
            made.append(t.tensor("unpacked weight in fp16", w.axes, FP16, Role.WORKSPACE))
    return made


def decoder(fmt: WeightFormat, stack: Stack) -> str:
    """The kernel that unpacks: before transformers took gptqmodel it unpacked GPTQ's int32 words
    by torch operations where it trained.

    Source: optimum gptq/quantizer.py select_quant_linear (use_triton=False); AutoGPTQ
    nn_modules/qlinear/qlinear_cuda_old.py forward, whose fused kernels have no backward (unsloth
    PR 141 says so of early 2024); transformers 4.48 quantizers/quantizer_gptq.py (gptqmodel).
    """
    by_operations = (
        fmt.words == "inputs"
        and stack.model.is_transformers_before((4, 48))
        and not stack.quantizer.unpacks_words
    )
    return "int4-ops" if by_operations else fmt.dequantize_kernel
