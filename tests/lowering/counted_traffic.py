"""The bytes that a piece of torch code moves, counted op by op as the dispatcher sees them.

A kernel reads each of its arguments once and writes each of its results once, whatever happens
inside it. Views, metadata and empty tensors move nothing. Tensors of one element (step counters,
norms) and shared lookup tables are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
NOTHING_MOVED = ("empty", "empty_like", "new_empty", "empty_strided", "_linalg_svd", "detach")
# Schemas mark these as written because of an inner scaling that is not asked for.
READ_ONLY = ("grads", "g")
NOT_RUN = ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise")


class Kernel(NamedTuple):
    """One op: its name, bytes read and written, and (m, n, k) of a product."""

    name: str
    moved: int
    product: tuple[int, int, int] | None = None


class CountedTraffic(TorchDispatchMode):
    """Lists the kernels of what runs inside; bitsandbytes' own are counted and not run."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::copy_" and args[0].data_ptr() == args[1].data_ptr():
            return args[0]  # torch finds that both are one tensor
        short = name.rpartition("::")[2]
        moved = 0 if short in NOTHING_MOVED else _bytes(_arguments(func, args, kwargs))
        out = None if name in NOT_RUN else func(*args, **kwargs)
        if short in NOTHING_MOVED or _is_view(func):
            return out
        if not func._schema.is_mutable:
            moved += _bytes(("", t, False) for t in tree_leaves(out))
        if moved:
            self.kernels.append(Kernel(short, moved, _product(short, args)))
        return out

    @property
    def moved(self) -> int:
        """Bytes of everything but products."""
        return sum(kernel.moved for kernel in self.kernels if kernel.product is None)

    @property
    def products(self) -> list[tuple[int, int, int]]:
        return [kernel.product for kernel in self.kernels if kernel.product is not None]


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any, bool]]:
    """(name, tensor, whether it is written) of every tensor among a call's arguments."""
    for index, argument in enumerate(func._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and func._schema.name == "aten::copy_":
            written = False  # its destination is written and not read: counted once
        for leaf in tree_leaves(given):
            yield argument.name, leaf, written and argument.name not in READ_ONLY


def _bytes(tensors: Iterable[tuple[str, Any, bool]]) -> int:
    """Each storage once, and again where it is written."""
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for name, tensor, is_written in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() <= 1 or "qmap" in name:
            continue
        size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        read[tensor.data_ptr()] = size
        if is_written:
            written[tensor.data_ptr()] = size
    return sum(read.values()) + sum(written.values())


def _is_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _product(name: str, args: tuple[Any, ...]) -> tuple[int, int, int] | None:
    if name not in PRODUCTS:
        return None
    left, right = (a for a in args[-2:] if isinstance(a, torch.Tensor))
    return left.shape[-2], right.shape[-1], left.shape[-1]
