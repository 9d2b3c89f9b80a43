"""What an operation makes of storage-less tensors, kept for the next call with operands alike.

Most operations reach their shape function through Python in torch (`torch._refs`), which takes half
of a trace's time, and layers repeat them. A result is kept where it is fresh: of an operation that
neither writes nor aliases, from tensors without storage alone, as `FakeTensorMode` keeps its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_ABSENT = object()
_SCALARS = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.layout,
        torch.device,
        torch.memory_format,
    )
)
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_known: dict[Any, Any] = {}
MOST_KNOWN = 20_000  # then it begins anew: a process that traces all day stays small


class _Unkept(Exception):
    """An operand or a result that is not described by its sizes."""


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, made from what an earlier call gave where the operands are alike."""
    if not _is_fresh(func):
        return func(*args, **kwargs)
    try:
        found = [func, torch.get_default_dtype()]
        tensors = _describe(args, found)
        for name, value in kwargs.items():
            found.append(name)
            tensors += _describe((value,), found)
        if not tensors:  # a factory is as quick
            raise _Unkept
        key = tuple(found)
    except _Unkept:
        return func(*args, **kwargs)
    made = _known.get(key, _ABSENT)
    if made is _ABSENT:
        out = func(*args, **kwargs)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = None if _shares(out, (args, kwargs)) else _recipe(out)
        return out
    return func(*args, **kwargs) if made is None else _remade(made)


@functools.cache
def _is_fresh(func: Any) -> bool:
    """Whether an operation writes to nothing and returns no alias, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func.namespace != "aten":
        return False
    return all(returned.alias_info is None for returned in schema.returns)


def _describe(values: Any, found: list[Any]) -> int:
    """Adds what a result can depend on, and says how many tensors there were."""
    count = 0
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            dtype = value.dtype
            if value.device.type != "meta" or dtype.is_complex or value.layout != torch.strided:
                raise _Unkept
            found += (value.shape, value.stride(), dtype)
            count += 1
        elif kind in _SCALARS:
            found += (kind, value)
        elif kind in (list, tuple):
            found += (kind, len(value))
            count += _describe(value, found)
        else:
            raise _Unkept
    return count


def _shares(out: Any, operands: Any) -> bool:
    """Whether a result is one of the operands, or a view of it that its schema does not tell."""
    storages = _storages(operands)
    return bool(storages & _storages(out))


def _storages(tree: Any) -> set[int]:
    return {
        tensor.untyped_storage()._cdata
        for tensor in tree_flatten(tree)[0]
        if isinstance(tensor, torch.Tensor)
    }


def _recipe(out: Any) -> Any:
    """Sizes, strides and type of a fresh result; None where it is not made by these alone."""
    if isinstance(out, torch.Tensor):
        return _of_one(out)
    if type(out) not in (list, tuple):
        return None
    parts = [None if part is None else _of_one(part) for part in out]
    if any(part is None and given is not None for part, given in zip(parts, out, strict=True)):
        return None
    storages = [part.untyped_storage()._cdata for part in out if part is not None]
    return [type(out), parts] if len(set(storages)) == len(storages) else None


def _of_one(out: Any) -> tuple[Any, ...] | None:
    if type(out) is not torch.Tensor or out.device.type != "meta" or out.layout != torch.strided:
        return None
    if out.dtype.is_complex or out.storage_offset():
        return None
    recipe = (tuple(out.shape), out.stride(), out.dtype)
    whole = out.untyped_storage().nbytes() == _remade(recipe).untyped_storage().nbytes()
    return recipe if whole else None


def _remade(made: Any) -> Any:
    if type(made) is list:
        kind, parts = made
        return kind(None if part is None else _remade(part) for part in parts)
    size, stride, dtype = made
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
