"""What operations give on meta tensors, remembered: a recording runs the same few operations
thousands of times, and many meta kernels are Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

_RESULTS: dict[Any, tuple[list[Layout], type] | None] = {}
_PURE: dict[Any, bool] = {}


class _NotAlikeError(Exception):
    """An argument that no key stands for."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, by new tensors of the layouts that the same call gave before. What
    writes over or looks at its inputs is run each time."""
    if not _is_pure(func):
        return func(*args, **kwargs)
    try:
        key = (func, _key(args), _key(kwargs))
    except _NotAlikeError:
        return func(*args, **kwargs)
    if key not in _RESULTS:
        # on tensors of its own: kernels in Python may hold theirs in cycles
        own = _alike((args, kwargs))
        _RESULTS[key] = _layouts(func(*own[0], **own[1]), own)
    known = _RESULTS[key]
    if known is None:
        return func(*args, **kwargs)
    made = [_empty(layout) for layout in known[0]]
    return made[0] if known[1] is torch.Tensor else known[1](made)


def _alike(given: Any) -> Any:
    def alike(x: Any) -> Any:
        return _empty((tuple(x.shape), x.stride(), x.dtype)) if isinstance(x, torch.Tensor) else x

    return tree_map(alike, given)


def _is_pure(func: Any) -> bool:
    if func not in _PURE:
        schema = func._schema
        _PURE[func] = all(x.alias_info is None for x in (*schema.arguments, *schema.returns))
    return _PURE[func]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            raise _NotAlikeError
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(_key(x) for x in value)
    if isinstance(value, dict):
        return tuple((name, _key(x)) for name, x in value.items())
    if isinstance(value, (bool, int, float)):
        return type(value), value
    if value is None or isinstance(value, (str, torch.dtype, torch.device, torch.layout)):
        return value
    if isinstance(value, torch.memory_format):
        return str(value)
    raise _NotAlikeError


def _layouts(out: Any, given: Any) -> tuple[list[Layout], type] | None:
    """The layouts of a result that is new dense tensors and nothing else (`_unsafe_view` is a view,
    whatever its schema says)."""
    before = {_storage(x) for x in tree_leaves(given) if isinstance(x, torch.Tensor)}
    kind = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
    if kind not in (torch.Tensor, list, tuple):
        return None
    found: list[Layout] = []
    for x in [out] if kind is torch.Tensor else out:
        if not isinstance(x, torch.Tensor) or x.device.type != "meta" or x.storage_offset():
            return None
        if _storage(x) in before:
            return None
        layout = tuple(x.shape), x.stride(), x.dtype
        if _empty(layout).untyped_storage().nbytes() != x.untyped_storage().nbytes():
            return None
        found.append(layout)
    return found, kind


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _empty(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")
