"""What a row of the tensor table says about itself: type, elements, axes and shape in words."""

from __future__ import annotations

from napkinmath.base.dtypes import find_dtype
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Expr, product, render
from napkinmath.base.units import format_bytes
from napkinmath.report.formula import simplify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.ir.timeline import TensorInfo

LONGEST_SHAPE = 30  # characters of a formula that still fit a phrase


def stored_type(tensor: TensorInfo) -> DType | None:
    """The type of a tensor's elements, by our name or torch's; None where it is unknown."""
    try:
        return find_dtype(tensor.dtype)
    except InputError:
        return None


def type_name(tensor: TensorInfo) -> str:
    """'bf16' for bfloat16; what the timeline says where the type is unknown."""
    dtype = stored_type(tensor)
    return dtype.name if dtype is not None else tensor.dtype


def num_elements(tensor: TensorInfo) -> int:
    """Elements as stored, from bytes and type; 0 where the type is unknown."""
    dtype = stored_type(tensor)
    return tensor.nbytes * 8 // dtype.bits if dtype is not None else 0


def shape_text(tensor: TensorInfo) -> str:
    """'b·s·h' where the axes are symbols, '4·2048·4096' where they are numbers, else the size."""
    axes = tensor_axes(tensor)
    if not axes:
        return format_bytes(tensor.nbytes)
    if any(isinstance(axis, Expr) for axis in axes):
        text = render(simplify(product(axes)))
        return text if len(text) <= LONGEST_SHAPE else format_bytes(tensor.nbytes)
    return "·".join(str(axis) for axis in axes if axis != 1) or "1"


def tensor_axes(tensor: TensorInfo) -> tuple[Size, ...]:
    """The axes of a tensor; empty where the timeline does not know them."""
    axes: Any = tensor.axes
    return tuple(axes) if type(axes) in (tuple, list) else ()
