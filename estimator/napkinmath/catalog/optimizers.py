"""Optimizers, one row each: what they keep for every trained parameter, and what exists only during the step."""

from __future__ import annotations

from napkinmath.dtypes import FP32, UINT8, DType
from napkinmath.errors import InputError, shown, suggest
from napkinmath.expr import Size, ceil_div, maximum, minimum
from napkinmath.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ledger import Weight


class State(Record):
    """One tensor kept for a parameter: elements as a function of its shape, and a type (None: the parameter's own)."""

    name: str
    dtype: DType | None = None
    elements: Callable[[tuple[Size, ...]], Size] | None = None
    """None: one element for each of the parameter's."""
    min_elements: int = 0
    """Parameters smaller than this keep `small_dtype` states instead (bitsandbytes: 4096)."""


class Optimizer(Record):
    """A row: states, temporaries of the step, traffic, and where the facts come from."""

    name: str
    meaning: str
    source: str
    states: tuple[State, ...] = ()
    foreach_copies: int = 0
    """Parameter-sized temporaries that a foreach implementation holds for all parameters at once."""
    single_copies: int = 0
    """Parameter-sized temporaries of one parameter at a time."""
    traffic_passes: float = 7.0
    """Parameter-sized reads and writes of the step, states included in their own type."""
    paged: bool = False
    """States in unified memory: they spill to the host when the device is full."""
    launches_per_parameter: int = 0
    flops_per_element: int = 0
    matrix_only: bool = False
    """Acts on matrices; other parameters use `fallback`."""
    fallback: str = "adamw-fused"

    def state_tensors(self, weight: Weight) -> list[tuple[str, Size, DType]]:
        """(name, elements, dtype) of every state kept for a parameter."""
        found: list[tuple[str, Size, DType]] = []
        for state in self.states:
            count = state.elements(weight.axes) if state.elements else weight.elements
            found.append((state.name, count, state.dtype or weight.tensor.dtype))
        return found


def blocks_of_256(axes: tuple[Size, ...]) -> Size:
    """fp32 scales of an 8-bit state: one for every 256 elements."""
    return ceil_div(_count(axes), 256)


def rows(axes: tuple[Size, ...]) -> Size:
    """Adafactor's row statistics: everything but the last axis; a vector keeps all its elements."""
    return _count(axes[:-1]) if len(axes) > 1 else _count(axes)


def columns(axes: tuple[Size, ...]) -> Size:
    """Adafactor's column statistics: everything but the second to last axis; none for a vector."""
    return _count((*axes[:-2], axes[-1])) if len(axes) > 1 else 0


def table(axes: tuple[Size, ...]) -> Size:
    """A 256-entry quantization map, kept with each parameter."""
    return 256


def scalar(axes: tuple[Size, ...]) -> Size:
    """One element (torch's capturable step counter)."""
    return 1


def low_rank(rank: int) -> Callable[[tuple[Size, ...]], Size]:
    """GaLore's projected moment: rank times the longer side of a matrix."""
    return lambda axes: rank * maximum(axes[0], axes[-1]) if len(axes) > 1 else _count(axes)


def projector(rank: int) -> Callable[[tuple[Size, ...]], Size]:
    """GaLore's projection matrix: rank times the shorter side."""
    return lambda axes: rank * minimum(axes[0], axes[-1]) if len(axes) > 1 else 0


def _count(axes: tuple[Size, ...]) -> Size:
    total: Size = 1
    for axis in axes:
        total = total * axis
    return total


_ADAM = (State(name="exp_avg"), State(name="exp_avg_sq"))
_ADAM_8BIT = (
    State(name="state1", dtype=UINT8), State(name="state2", dtype=UINT8), State(name="absmax1", dtype=FP32, elements=blocks_of_256), State(name="absmax2", dtype=FP32, elements=blocks_of_256),
    State(name="qmap1", dtype=FP32, elements=table), State(name="qmap2", dtype=FP32, elements=table),
)  # fmt: skip
_TORCH = "torch 2.13 optim/"
_BNB = "bitsandbytes 0.50 optim/optimizer.py"

OPTIMIZERS: dict[str, Optimizer] = {
    row.name: row
    for row in (
        Optimizer(name="sgd", meaning="SGD without momentum", source=_TORCH + "sgd.py", traffic_passes=3),
        Optimizer(name="momentum", meaning="SGD with momentum", source=_TORCH + "sgd.py", states=(State(name="momentum_buffer"),), traffic_passes=5),
        Optimizer(name="adamw", meaning="AdamW, for-loop implementation", source=_TORCH + "adamw.py _single_tensor_adam", states=_ADAM, single_copies=2, traffic_passes=16, launches_per_parameter=12),
        Optimizer(name="adamw-foreach", meaning="AdamW, foreach implementation", source=_TORCH + "adam.py _multi_tensor_adam: exp_avg_sq_sqrt", states=_ADAM, foreach_copies=1, traffic_passes=14),
        Optimizer(name="adamw-fused", meaning="AdamW, fused implementation", source=_TORCH + "adam.py _fused_adam", states=(*_ADAM, State(name="step", dtype=FP32, elements=scalar)), traffic_passes=7),
        Optimizer(name="adamw-8bit", meaning="bitsandbytes AdamW with 8-bit states", source=_BNB, states=_ADAM_8BIT, traffic_passes=5, launches_per_parameter=1),
        Optimizer(name="paged-adamw-8bit", meaning="bitsandbytes 8-bit AdamW, states in paged memory", source=_BNB, states=_ADAM_8BIT, traffic_passes=5, paged=True, launches_per_parameter=1),
        Optimizer(name="paged-adamw", meaning="bitsandbytes AdamW, 32-bit states in paged memory", source=_BNB, states=(State(name="state1", dtype=FP32), State(name="state2", dtype=FP32)), traffic_passes=11, paged=True, launches_per_parameter=1),
        Optimizer(name="adafactor", meaning="Adafactor with factored second moment, no momentum", source="transformers 5.23 optimization.py Adafactor", states=(State(name="exp_avg_sq_row", dtype=FP32, elements=rows), State(name="exp_avg_sq_col", dtype=FP32, elements=columns)), single_copies=3, traffic_passes=12, launches_per_parameter=20),
        Optimizer(name="lion", meaning="Lion, one momentum", source="arXiv 2302.06675", states=(State(name="exp_avg"),), single_copies=1, traffic_passes=7, launches_per_parameter=6),
        Optimizer(name="lion-8bit", meaning="bitsandbytes Lion with an 8-bit momentum", source=_BNB, states=(_ADAM_8BIT[0], _ADAM_8BIT[2], _ADAM_8BIT[4]), traffic_passes=4, launches_per_parameter=1),
        Optimizer(name="muon", meaning="Muon on matrices (momentum, five Newton-Schulz steps in bf16), AdamW elsewhere", source=_TORCH + "_muon.py", states=(State(name="momentum_buffer"),), single_copies=3, traffic_passes=20, launches_per_parameter=40, matrix_only=True),
        Optimizer(name="galore", meaning="GaLore: Adam moments in a rank-128 projection", source="arXiv 2403.03507; rank 128", states=(State(name="exp_avg", elements=low_rank(128)), State(name="exp_avg_sq", elements=low_rank(128)), State(name="projector", elements=projector(128))), single_copies=2, traffic_passes=10, launches_per_parameter=14),
        Optimizer(name="apollo", meaning="APOLLO: Adam moments in a rank-256 random projection made from a seed", source="arXiv 2412.05270; rank 256", states=(State(name="exp_avg", elements=low_rank(256)), State(name="exp_avg_sq", elements=low_rank(256))), single_copies=2, traffic_passes=10, launches_per_parameter=14),
        Optimizer(name="lomo", meaning="LOMO: SGD fused into the backward, no states, no stored gradients", source="arXiv 2306.09782", traffic_passes=3, launches_per_parameter=2),
        Optimizer(name="anyprecision-adamw", meaning="AdamW with states and Kahan compensation in the parameter's type", source="torchdistx optimizers/anyprecision_optimizer.py", states=(*_ADAM, State(name="compensation")), single_copies=2, traffic_passes=18, launches_per_parameter=14),
    )
}  # fmt: skip
ALIASES = {
    "adamw_torch": "adamw-foreach", "adamw_torch_fused": "adamw-fused", "adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit", "paged_adamw_32bit": "paged-adamw",
    "adam": "adamw", "sgd-momentum": "momentum", "adamw-loop": "adamw", "adamw_hf": "adamw", "lion_32bit": "lion", "lion_8bit": "lion-8bit", "galore_adamw": "galore", "apollo_adamw": "apollo", "adamw_anyprecision": "anyprecision-adamw",
}  # fmt: skip
IN_BACKWARD = frozenset({"lomo"})


def find_optimizer(name: str) -> Optimizer:
    """The row of that name or of the Trainer's `optim` string; raises InputError with the nearest names."""
    row = OPTIMIZERS.get(ALIASES.get(name.lower(), name.lower()))
    if row is None:
        raise InputError(f"optimizer {shown(name)} is unknown; use one of {', '.join(OPTIMIZERS)}{suggest(name, [*OPTIMIZERS, *ALIASES])}")
    return row
