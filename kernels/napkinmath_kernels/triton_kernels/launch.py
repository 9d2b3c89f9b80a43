"""Launching a kernel, on a GPU or in Triton's CPU interpreter, and declaring what is shipped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..backend import is_interpreted

os.environ.setdefault(
    "TRITON_DEFAULT_FP_FUSION", "1"
)  # the default; triton 3.9 warns when it is not said

Grid = tuple[int, ...]


ALL_ARCHITECTURES = (80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Shipped:
    """One configuration that a GPU user can meet: what the compile gate compiles, and the
    properties it holds it to.

    Arguments named `*_ptr` are pointers to bf16 and the rest `i32`, unless `types` says otherwise;
    `constexprs` fixes the others. Pointers, strides, `hidden` and what `aligned` names are
    multiples of 16, as callers pass them, which makes wide loads legal. `values_per_program` and
    `max_instructions_per_value` bound straight-line kernels. `forbidden` is a pattern of
    instructions that must not appear, and `options` are further compiler options. `most_spills` are
    the local accesses it may have, none unless a GPU timed it faster with them.
    """

    name: str
    kernel: Any
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int
    types: Mapping[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ALL_ARCHITECTURES
    has_dot: bool = False
    values_per_program: int = 0
    max_instructions_per_value: float = 0.0
    forbidden: str = ""
    has_wide_loads: bool = True
    has_wide_stores: bool = True
    options: Mapping[str, object] = field(default_factory=dict)
    most_spills: int = 0

    def signature(self) -> dict[str, str]:
        """Argument name to Triton type, in order."""
        default = {
            name: "*bf16" if name.endswith("_ptr") else "i32" for name in self.kernel.arg_names
        }
        return default | dict(self.types) | dict.fromkeys(self.constexprs, "constexpr")

    def aligned_positions(self) -> list[int]:
        """Positions of the arguments that are multiples of 16."""
        suffixes = ("_ptr", "_stride", "hidden", *self.aligned)
        return [
            i
            for i, name in enumerate(self.kernel.arg_names)
            if name.endswith(suffixes) and name not in self.constexprs
        ]


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as fp32, seen through the same strides, so that what lies around
    it stays visible."""
    storage = tensor.as_strided(
        (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
    )
    return storage.float().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage_of(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return tensor.data.as_strided(
        (length,), (1,), 0
    )  # .data: an input copied back unchanged is not a new version of it


def _run_interpreted(
    kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Runs bf16 tensors as fp32 copies: the interpreter keeps bf16 as integers, and its arithmetic
    on them is silently wrong.

    Storages are shared between tensors that overlap, so each is copied once and copied back whole;
    a value that the kernel did not touch survives the round trip exactly.
    """
    import numpy

    shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    shadowed: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dtype is torch.bfloat16:
            key = arg.untyped_storage().data_ptr()
            if key not in shadows:
                shadow = _shadow(arg)
                shadows[key] = (arg, shadow)
            base = shadows[key][1]
            shadowed.append(base.as_strided(arg.shape, arg.stride(), arg.storage_offset()))
        else:
            shadowed.append(arg)
    with (
        numpy.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):  # a GPU makes NaN and Inf without a word, and so does this
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # triton 3.6 makes scalars of arrays, which NumPy 2.3 minds
        kernel[grid](*shadowed, **options)
    for original, shadow in shadows.values():
        length = original.untyped_storage().nbytes() // original.element_size()
        _storage_of(original, length).copy_(_storage_of(shadow, length))


NUM_PROCESSORS_ON_META = 132


def launch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    """Runs `kernel` over `grid`; empty grids are skipped. `options` are constexprs, `num_warps` and
    `num_stages`."""
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if (
        device.type == "meta"
    ):  # nothing to launch on; what the kernel would write into has been allocated
        return
    if is_interpreted():
        _run_interpreted(kernel, grid, args, options)
        return
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        kernel[grid](*args, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **options)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own takes microseconds outside of a kernel."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is n or more, as Triton's own has it."""
    return 1 << (n - 1).bit_length()


def num_processors(tensor: torch.Tensor) -> int:
    """Streaming multiprocessors of the tensor's GPU; 4 stand in for them in the interpreter, an
    H100's 132 on meta."""
    if tensor.is_cuda:
        return torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return NUM_PROCESSORS_ON_META if tensor.device.type == "meta" else 4
