"""What an optimizer keeps for each parameter, and what its step makes: the records of optimizers.py
and the sizes of their tensors."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32, INT16
from napkinmath.base.expr import Size, ceil_div, maximum, minimum, product
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.base.dtypes import DType

    Axes = tuple[Size, ...]


SMALL = 4096  # elements below which bitsandbytes keeps 32-bit states (min_8bit_size)


PAGED = 100_000  # elements from which bitsandbytes puts states into paged memory (get_state_buffer)


class State(Record):
    """One tensor kept for a parameter: elements as a function of its shape, and a type (None: the
    parameter's own)."""

    name: str
    dtype: DType | None = None
    elements: Callable[[Axes], Size] | None = None
    """None: one element for each of the parameter's."""
    at_least: int = 0
    """Only for parameters of so many elements or more."""
    below: int = 0
    """Only for parameters of fewer elements; 0 is no limit."""
    shared: bool = False
    """One tensor for all parameters."""
    pageable: bool = False
    """Lives in paged memory where the optimizer is paged and the parameter large enough."""


class Temporary(Record):
    """A tensor that the step of one parameter makes; a second one of the same name replaces the
    first, as a Python variable does."""

    name: str
    dtype: DType | None = None
    elements: Callable[[Axes], Size] | None = None
    cast_of: str = ""
    """What it is a cast of; made only where that is of another type."""


class Product(Record):
    """A product of matrices in the step of one matrix: (m, n, k) as a function of its shape, None
    for a matrix without that product. A `dtype` of None is the parameter's own type."""

    sides: Callable[[Axes], tuple[Size, Size, Size] | None]
    dtype: DType | None = None
    times: int = 1


class Optimizer(Record):
    """A row: states, temporaries of the step, kernels and products, and where the facts come
    from."""

    name: str
    meaning: str
    source: str
    states: tuple[State, ...] = ()
    foreach: tuple[str, ...] = ()
    """Parameter-sized temporaries that a foreach implementation holds for all parameters of a type
    at once."""
    script: tuple[Temporary | str, ...] = ()
    """Temporaries of a for-loop in order; a name alone ends that temporary's life. What is left
    lives until replaced."""
    kernels: tuple[str, ...] = ()
    """What each kernel of the step writes and reads, by name: 'weight = weight, exp_avg'. Reductions
    to a few numbers write nothing: '= update'. Empty: one fused kernel, which reads the gradient,
    and reads and writes the weight and every state."""
    products: tuple[Product, ...] = ()
    """Run for matrices only."""
    multi_tensor: bool = False
    """A foreach implementation: each kernel takes many parameters at once."""
    paged: bool = False
    """States in unified memory: they spill to the host when the device is full."""
    matrix_only: bool = False
    """Acts on matrices; other parameters use `fallback`."""
    fallback: str = "adamw-fused"
    foreach_dtype: DType | None = None
    """Of the foreach temporaries; None: the type of what is updated."""
    master: DType | None = None
    """Of a copy of each weight that the optimizer keeps itself, instead of the trainer; it then reads
    gradients in the type that they are summed in. INT16: the bits that a bf16 weight lacks."""
    in_backward: bool = False
    """Updates each parameter as its gradient is made, whatever is configured."""

    @property
    def foreach_copies(self) -> int:
        """Parameter-sized temporaries held for all parameters of a type at once."""
        return len(self.foreach)

    def master_of(self, stored: DType) -> DType | None:
        """The type of its own copy of a weight stored so; None without one. Only a bf16 weight is
        the upper half of an fp32 one."""
        return FP32 if self.master is INT16 and stored is not BF16 else self.master


def blocks_of_256(axes: Axes) -> Size:
    """fp32 scales of an 8-bit state: one for every 256 elements."""
    return ceil_div(product(axes), 256)


def blocks_of_128(axes: Axes) -> Size:
    """fp32 scales of a 4-bit state: one for every 128 elements."""
    return ceil_div(product(axes), 128)


def half(axes: Axes) -> Size:
    """Bytes of a state with two elements in each."""
    return ceil_div(product(axes), 2)


def double_blocks_of_256(axes: Axes) -> Size:
    """Scales of two stacked 8-bit states."""
    return 2 * ceil_div(product(axes), 256)


def double(axes: Axes) -> Size:
    """Two elements for each of the parameter's."""
    return 2 * product(axes)


def rows(axes: Axes) -> Size:
    """Adafactor's row statistics: everything but the last axis; a vector keeps all its elements."""
    return product(axes[:-1]) if len(axes) > 1 else product(axes)


def matrix_rows(axes: Axes) -> Size:
    """Row statistics of matrices alone."""
    return rows(axes) if len(axes) > 1 else 0


def columns(axes: Axes) -> Size:
    """Adafactor's column statistics: everything but the second to last axis; none for a vector."""
    return product((*axes[:-2], axes[-1])) if len(axes) > 1 else 0


def table(axes: Axes) -> Size:
    """A 256-entry quantization map."""
    return 256


def table_of_16(axes: Axes) -> Size:
    """A 16-entry quantization map."""
    return 16


def scalar(axes: Axes) -> Size:
    """One element (torch's step counter on the device)."""
    return 1


def gram(axes: Axes) -> Size:
    """The product of a matrix with its own transpose, on the shorter side."""
    side = minimum(axes[0], axes[-1])
    return side * side


def newton_schulz(steps: int) -> tuple[Product, ...]:
    """The products of so many orthogonalisation steps of a matrix, on its shorter side."""

    def sides(last: str) -> Callable[[Axes], tuple[Size, Size, Size]]:
        def found(axes: Axes) -> tuple[Size, Size, Size]:
            short, long = minimum(axes[0], axes[-1]), maximum(axes[0], axes[-1])
            return {
                "gram": (short, short, long),
                "square": (short, short, short),
                "matrix": (short, long, short),
            }[last]

        return found

    return tuple(
        Product(sides=sides(made), dtype=BF16, times=steps) for made in ("gram", "square", "matrix")
    )


def projected(rank: int) -> Product:
    """A gradient times `rank` directions of its shorter side."""
    return Product(
        sides=lambda axes: (
            minimum(rank, minimum(axes[0], axes[-1])),
            maximum(axes[0], axes[-1]),
            minimum(axes[0], axes[-1]),
        )
    )


def projected_back(rank: int) -> Product:
    """The update in the projection, brought back to the gradient's shape."""
    return Product(
        sides=lambda axes: (axes[0], axes[-1], minimum(rank, minimum(axes[0], axes[-1])))
    )


def low_rank(rank: int) -> Callable[[Axes], Size]:
    """A gradient projected on `rank` directions: rank times the longer side of a matrix."""
    return lambda axes: (
        minimum(rank, minimum(axes[0], axes[-1])) * maximum(axes[0], axes[-1])
        if len(axes) > 1
        else product(axes)
    )


def projector(rank: int) -> Callable[[Axes], Size]:
    """GaLore's projection matrix: rank times the shorter side."""
    return lambda axes: (
        minimum(rank, minimum(axes[0], axes[-1])) * minimum(axes[0], axes[-1])
        if len(axes) > 1
        else 0
    )
