"""Parameters that no linear multiplies, packed by bitsandbytes: experts held as one 3-D parameter.

A parametrization unpacks the whole parameter where it is read; torch keeps that copy until the
module's forward returns, and autograd keeps it for the gradient of what it multiplied. Sources:
bitsandbytes 0.50 nn/parametrize.py replace_parameter_4bit, functional.py dequantize_4bit; in int8
axolotl monkeypatch/moe_quant.py Bnb8bitParametrization, bitsandbytes backends/default/ops.py
int8_vectorwise_dequant, whose two products are fp32.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.ir.costs import Dequantize, Move
from napkinmath.ir.ledger import ALLOC, Role, Value, Weight, allocs, frees
from napkinmath.lowering.quantized import decoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Tensor
    from napkinmath.ir.tape import Scope, Tape


def read_as(t: Tape, weight: Weight) -> DType:
    """Type of a parameter where it is read: packed ones are unpacked into that of the model as
    loaded, or into fp32 from int8."""
    if not weight.constants or t.policy.format is None:
        return weight.tensor.dtype
    return FP32 if t.policy.format.multiplies_integers else t.policy.compute_dtype


def whole_parameter(t: Tape, frame: Scope, weight: Weight) -> Value:
    """A parameter as its module reads it; an unpacked copy lives until the module returns."""
    whole = unpacked_parameter(t, weight)
    if weight.constants:
        frame.local(whole)
    return whole


def unpacked_parameter(t: Tape, weight: Weight) -> Value:
    """A parameter, or the unpacked copy of a packed one."""
    fmt = t.policy.format
    if not weight.constants or fmt is None:
        return weight.value
    dtype = read_as(t, weight)
    whole = Value(t.tensor("unpacked parameter", weight.axes, dtype), weight.axes, dtype)
    unpack = Dequantize(decoder(fmt, t.policy.stack), weight.elements, fmt.bits, dtype)
    costs: tuple[Dequantize | Move, ...] = (unpack,)
    meanwhile: tuple[Tensor, ...] = ()
    if fmt.multiplies_integers:
        meanwhile = (t.tensor("integers times scales", weight.axes, FP32, Role.WORKSPACE),)
        costs = (unpack, Move(2 * whole.tensor.nbytes))
    elif fmt.double_quant:
        scales = (fmt.groups(weight.axes),)
        meanwhile = (t.tensor("scales in fp32", scales, FP32, Role.WORKSPACE),)
    t.append(
        f"unpack {fmt.name}",
        (weight.value,),
        (whole,),
        forward=(*allocs(*meanwhile), (ALLOC, whole.tensor), *frees(*meanwhile)),
        costs=costs,
    )
    return whole
