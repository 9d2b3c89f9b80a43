"""Fused linears with adapters over frozen or 4-bit weights: what they keep and cost."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT32, INT64, DType
from napkinmath.base.expr import Size, maximum
from napkinmath.base.record import Record
from napkinmath.catalog.kernel_cost import KernelCost, Saved, stored_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class FusedLinear(Record):
    """A frozen linear of a fused adapter operation: its size, its adapter's rank (0: none), and the
    stored tensors of a packed weight."""

    outputs: Size
    inputs: Size
    rank: Size
    stored: tuple[Saved, ...] = ()

    @property
    def elements(self) -> Size:
        """Weights."""
        return self.outputs * self.inputs

    @property
    def stored_bytes(self) -> Size:
        """Bytes read to decode it."""
        return _sum(saved.nbytes for saved in self.stored)

    def flops(self, rows: Size) -> tuple[Size, Size]:
        """Forward and backward, decoding included."""
        base = 2 * rows * self.elements
        thin = 2 * rows * self.rank * (self.outputs + self.inputs)
        decode = self.elements if self.stored else 0
        return base + thin + decode, base + 2 * thin + decode

    def forward_temporary(
        self, rows: Size, dtype: DType, adapter_dtype: DType, *, dropout: bool
    ) -> Size:
        """The dropped x and A in x's type while x A^T is made; B in x's type after that."""
        if not self.rank:
            return 0
        cast = 0 if adapter_dtype is dtype else self.rank * stored_bytes(dtype)
        dropped = rows * self.inputs * stored_bytes(dtype) if dropout else 0
        return maximum(dropped + cast * self.inputs, cast * self.outputs)

    def backward_temporary(
        self, rows: Size, dtype: DType, adapter_dtype: DType, *, dropout: bool, before: Size = 0
    ) -> Size:
        """dy B, and beside it B or A in x's type, with dropout the adapter's share of dx or the
        dropped x.

        `before` is the rank of the linear ahead, whose dy B is dropped as this one's has been made.
        """
        if not self.rank:
            return 0
        item = stored_bytes(dtype)
        cast = 0 if adapter_dtype is dtype else self.rank * item
        share = rows * self.inputs * item if dropout else 0
        return rows * self.rank * item + maximum(
            rows * before * item + cast * self.outputs, share + cast * self.inputs
        )


def _sum(sizes: Iterable[Size]) -> Size:
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


def _adapter_tensors(linears: tuple[FusedLinear, ...], dtype: DType) -> tuple[Saved, ...]:
    first = [
        Saved(name="A", axes=(x.rank, x.inputs) if x.rank else (0,), dtype=dtype, is_new=False)
        for x in linears
    ]
    return (
        *first,
        *(
            Saved(name="B", axes=(x.outputs, x.rank) if x.rank else (0,), dtype=dtype, is_new=False)
            for x in linears
        ),
    )


def _projections(rows: Size, linears: tuple[FusedLinear, ...], dtype: DType) -> tuple[Saved, ...]:
    return tuple(
        Saved(name="x A^T", axes=(rows, x.rank) if x.rank else (0,), dtype=dtype, is_new=True)
        for x in linears
    )


def _seed(dropout: bool) -> tuple[Saved, ...]:
    return (Saved(name="seed", axes=(1,), dtype=INT64, is_new=True),) if dropout else ()


def qlora_linears(
    rows: Size,
    linears: tuple[FusedLinear, ...],
    dtype: DType,
    *,
    adapter_dtype: DType = FP32,
    dropout: bool = False,
) -> KernelCost:
    """Linears that read one x, which is saved once: each adapter's projection beside it, and with
    dropout a seed.

    The decoded weight lies in a buffer that all operations share and is not counted among the
    temporaries.
    """
    item, x_bytes = stored_bytes(dtype), rows * linears[0].inputs * stored_bytes(dtype)
    saved = (
        Saved(name="x", axes=(rows, linears[0].inputs), dtype=dtype, is_new=False),
        *(tensor for x in linears for tensor in x.stored),
        *_adapter_tensors(linears, adapter_dtype),
        *_projections(rows, linears, dtype),
        *_seed(dropout),
    )
    flops = [x.flops(rows) for x in linears]
    decoded, y_bytes = (
        _sum(x.elements for x in linears) * item,
        _sum(x.outputs for x in linears) * rows * item,
    )
    stored = _sum(x.stored_bytes for x in linears)
    forward = backward = before = 0
    for x in linears:
        forward = maximum(forward, x.forward_temporary(rows, dtype, adapter_dtype, dropout=dropout))
        backward = maximum(
            backward,
            x.backward_temporary(rows, dtype, adapter_dtype, dropout=dropout, before=before),
        )
        before = x.rank
    return KernelCost(
        saved=saved,
        forward_flops=_sum(x for x, _ in flops),
        backward_flops=_sum(x for _, x in flops),
        forward_moved=stored + 2 * decoded + 2 * len(linears) * x_bytes + 3 * y_bytes,
        backward_moved=stored + 2 * decoded + 4 * len(linears) * x_bytes + 3 * y_bytes,
        forward_temporary=forward,
        backward_temporary=backward,
    )


def expert_linear(
    rows: Size, experts: Size, linear: FusedLinear, dtype: DType, *, adapter_dtype: DType = FP32
) -> KernelCost:
    """A frozen linear of every expert over rows sorted by expert, each with its adapter: `linear` is
    one expert's, but for `stored`, which is the whole stack's.

    The decoded stack lies in the buffer that all operations share.
    """
    item, rank, inputs, outputs = stored_bytes(dtype), linear.rank, linear.inputs, linear.outputs
    stack = linear.stored or (
        Saved(name="stack", axes=(experts, outputs, inputs), dtype=dtype, is_new=False),
    )
    shapes = (("A", (experts, rank, inputs)), ("B", (experts, outputs, rank)))
    adapters = tuple(
        Saved(name=name, axes=axes, dtype=adapter_dtype, is_new=False) for name, axes in shapes
    )
    saved = (
        Saved(name="x", axes=(rows, inputs), dtype=dtype, is_new=False),
        Saved(name="offsets", axes=(experts,), dtype=INT32, is_new=False),
        Saved(name="x A^T", axes=(rows, rank) if rank else (0,), dtype=dtype, is_new=True),
        *stack,
        *(adapters if rank else ()),
    )
    values, thin = experts * outputs * inputs, 2 * rows * rank * (outputs + inputs)
    base, decode = 2 * rows * outputs * inputs, values if linear.stored else 0
    read = linear.stored_bytes + 2 * values * item if linear.stored else values * item
    x_bytes, y_bytes, narrow = rows * inputs * item, rows * outputs * item, rows * rank * item
    factors = experts * rank * (inputs + outputs) * stored_bytes(adapter_dtype)
    return KernelCost(
        saved=saved,
        forward_flops=base + thin + decode,
        backward_flops=base + 2 * thin + decode,
        forward_moved=read + 2 * x_bytes + 3 * y_bytes + 2 * narrow + factors,
        backward_moved=read + 3 * y_bytes + 4 * x_bytes + 4 * narrow + 2 * factors,
        backward_temporary=narrow,
    )


def qlora_mlp(
    rows: Size,
    linears: tuple[FusedLinear, FusedLinear, FusedLinear],
    dtype: DType,
    *,
    adapter_dtype: DType = FP32,
    dropout: bool = False,
    recompute: bool = False,
) -> KernelCost:
    """Gate, up and down in one operation: x, both outputs of the first two unless `recompute`,
    projections, and a seed with dropout.

    Temporaries of the backward: the gradients of the product and of up, and the product again,
    beside the last linear's own.
    """
    gate, up, down = linears
    item, width = stored_bytes(dtype), gate.outputs
    wide = (
        ()
        if recompute
        else tuple(
            Saved(name=name, axes=(rows, width), dtype=dtype, is_new=True)
            for name in ("gate", "up")
        )
    )
    biases = (
        tuple(Saved(name="bias", axes=(0,), dtype=dtype, is_new=False) for _ in range(2))
        if recompute
        else ()
    )
    saved = (
        Saved(name="x", axes=(rows, gate.inputs), dtype=dtype, is_new=False),
        *_seed(dropout),
        *(wide or biases),
        *_projections(rows, linears, dtype),
        *_adapter_tensors(linears, adapter_dtype),
        *(tensor for x in linears for tensor in x.stored),
    )
    first, second, third = (x.flops(rows) for x in linears)
    values, x_bytes = rows * width, rows * gate.inputs * item
    decoded, stored = (
        _sum(x.elements for x in linears) * item,
        _sum(x.stored_bytes for x in linears),
    )
    again = first[0] + second[0] if recompute else 0
    h_bytes = values * item
    recomputed = 2 * h_bytes if recompute else 0
    options = {"dropout": dropout}
    thin = rows * down.rank * item
    last = 3 * h_bytes + down.backward_temporary(rows, dtype, adapter_dtype, **options)
    others = maximum(
        gate.backward_temporary(rows, dtype, adapter_dtype, **options),
        up.backward_temporary(rows, dtype, adapter_dtype, before=gate.rank, **options),
    )
    return KernelCost(
        saved=saved,
        forward_flops=first[0] + second[0] + third[0] + 6 * values,
        backward_flops=first[1] + second[1] + third[1] + again + 12 * values,
        forward_moved=stored
        + 2 * decoded
        + 5 * x_bytes
        + 3 * (2 * h_bytes + x_bytes)
        + 5 * h_bytes,
        backward_moved=stored + 2 * decoded + 12 * x_bytes + 15 * h_bytes + 4 * recomputed,
        forward_temporary=h_bytes
        + recomputed
        + down.forward_temporary(rows, dtype, adapter_dtype, **options),
        backward_temporary=recomputed + maximum(last, 2 * h_bytes + thin + others),
    )
