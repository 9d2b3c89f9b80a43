"""How parts of a recorded operation are written as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from napkinmath.base.dtypes import find_dtype
from torch import nn

from napkinmath_profiler.tracing.learning.probing import GradientChoice, MadeStorage
from napkinmath_profiler.tracing.trace_errors import TraceError

# Operations whose work is a product of matrices, by the place of the factors among the inputs.
PRODUCTS = {
    "aten.mm.default": (0, 1),
    "aten.bmm.default": (0, 1),
    "aten.addmm.default": (1, 2),
    "aten.baddbmm.default": (1, 2),
}


class Shape(tuple[int, ...]):
    """Extents of a tensor: what differs between recordings."""


def linear_kind(module: nn.Module | None) -> str:
    """The kind of a linear's weight, by which adapters and quantizers choose."""
    if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
        return "linear"
    return "linear subclass" if isinstance(module, nn.Linear) else "router"


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a type; raises TraceError for complex numbers."""
    if dtype is torch.complex64:
        raise TraceError("it computes with complex numbers")
    return find_dtype(str(dtype)).name


def made_row(made: MadeStorage) -> list[Any]:
    """[extents, type] of a storage."""
    return [Shape(made.shape), dtype_name(made.dtype)]


def steps_text(steps: Sequence[tuple[str, int]]) -> str:
    """'+0+1-0': storages made and let go, in order."""
    return "".join(f"{action}{number}" for action, number in steps)


def branch_row(branch: GradientChoice) -> list[Any]:
    """[saves, which outputs are differentiable, made, steps, gradients, kernels, kept]."""
    return [
        " ".join(f"{kind}{number}" for kind, number in branch.saves),
        "".join(str(int(x)) for x in branch.differentiable),
        [made_row(m) for m in branch.backward_made],
        steps_text(branch.backward),
        " ".join(f"{position}:{number}" for position, number in branch.gradients),
        branch.kernels,
        [made_row(m) for m in branch.kept],
    ]
