"""What a fused operation keeps for its backward, makes on the way, and moves."""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Size, product
from napkinmath.base.record import Record


class Saved(Record):
    """A tensor held from forward to backward; `is_new` if the operation made it for that, not if it
    is an input, parameter or result."""

    name: str
    axes: tuple[Size, ...]
    dtype: DType
    is_new: bool

    @property
    def nbytes(self) -> Size:
        """Its bytes."""
        return product(self.axes) * (self.dtype.bits // 8)


class KernelCost(Record):
    """One operation, forward and backward."""

    saved: tuple[Saved, ...]
    forward_flops: Size
    backward_flops: Size
    forward_moved: Size
    backward_moved: Size
    forward_temporary: Size = 0
    backward_temporary: Size = 0

    @property
    def new(self) -> tuple[Saved, ...]:
        """What exists only because the operation saved it."""
        return tuple(saved for saved in self.saved if saved.is_new)


def stored_bytes(dtype: DType) -> int:
    """Bytes of one stored element; 0 for types of less than a byte."""
    return dtype.bits // 8
