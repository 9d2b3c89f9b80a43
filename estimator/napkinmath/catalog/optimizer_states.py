"""What an optimizer keeps for each parameter, and what its step makes: the records of optimizers.py
and the sizes of their tensors."""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Size, ceil_div, maximum, minimum, product
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
    half_only: bool = False
    """Made only for parameters that are not fp32 (a cast)."""


class Optimizer(Record):
    """A row: states, temporaries of the step, traffic, and where the facts come from."""

    name: str
    meaning: str
    source: str
    states: tuple[State, ...] = ()
    foreach_copies: int = 0
    """Parameter-sized temporaries that a foreach implementation holds for all parameters of a type
    at once."""
    script: tuple[Temporary | str, ...] = ()
    """Temporaries of a for-loop in order; a name alone ends that temporary's life. What is left
    lives until replaced."""
    traffic_passes: float = 7.0
    """Parameter-sized reads and writes of the step, states included in their own type."""
    paged: bool = False
    """States in unified memory: they spill to the host when the device is full."""
    launches_per_parameter: int = 0
    newton_schulz_steps: int = 0
    """Orthogonalisation iterations on the momentum of each matrix."""
    matrix_only: bool = False
    """Acts on matrices; other parameters use `fallback`."""
    fallback: str = "adamw-fused"
    in_backward: bool = False
    """Updates each parameter as its gradient is made, whatever is configured."""


def blocks_of_256(axes: Axes) -> Size:
    """fp32 scales of an 8-bit state: one for every 256 elements."""
    return ceil_div(product(axes), 256)


def double_blocks_of_256(axes: Axes) -> Size:
    """Scales of two stacked 8-bit states."""
    return 2 * ceil_div(product(axes), 256)


def double(axes: Axes) -> Size:
    """Two elements for each of the parameter's."""
    return 2 * product(axes)


def rows(axes: Axes) -> Size:
    """Adafactor's row statistics: everything but the last axis; a vector keeps all its elements."""
    return product(axes[:-1]) if len(axes) > 1 else product(axes)


def columns(axes: Axes) -> Size:
    """Adafactor's column statistics: everything but the second to last axis; none for a vector."""
    return product((*axes[:-2], axes[-1])) if len(axes) > 1 else 0


def table(axes: Axes) -> Size:
    """A 256-entry quantization map."""
    return 256


def scalar(axes: Axes) -> Size:
    """One element (torch's step counter on the device)."""
    return 1


def gram(axes: Axes) -> Size:
    """The product of a matrix with its own transpose, on the shorter side."""
    side = minimum(axes[0], axes[-1])
    return side * side


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
