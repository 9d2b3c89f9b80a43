"""Values of small integer tensors on the meta device, computed beside them: token ids, labels,
masks, sizes of images. A model that inspects one finds what a real step would."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
MOST_ELEMENTS = 1 << 18
"""A mask of pairs of tokens is larger; nothing asks for its values."""
# Operations whose result's shape depends on values.
BY_VALUE = frozenset(
    {
        aten.nonzero.default,
        aten.masked_select.default,
        aten.repeat_interleave.Tensor,
        aten.repeat_interleave.self_Tensor,
        aten.unique_consecutive.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.bincount.default,
    }
)
# Whose result holds nothing yet, or what chance says.
WITHOUT_VALUES = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
# Which hand on what a tensor is like.
SAME_CONTENT = frozenset(
    {
        aten._to_copy.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.alias.default,
        aten.detach.default,
    }
)
_values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_nowhere_zero: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def on_meta(values: torch.Tensor) -> torch.Tensor:
    """A meta tensor of that shape and type, whose values are known."""
    made = torch.empty_like(values, device="meta")
    _values[made] = values
    return made


def without_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, noted as pixels of which none is exactly zero: a model that looks for tiles
    of padding finds none."""
    _nowhere_zero[tensor] = True
    return tensor


def give_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Note the values of a meta tensor that were worked out elsewhere: of a mask that a model makes
    from floating numbers."""
    _values[tensor] = values


@contextmanager
def written_out() -> Generator[None]:
    """Inside the block `torch.tensor` of numbers on meta has them as values: it copies them there
    below every dispatch mode."""
    plain = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = plain(data, *args, **kwargs)
        known = all(value_of(x) is not None for x in _tensors(data))
        if _is_small_integer(made) and made not in _values and known:
            data = tree_map(lambda x: value_of(x) if isinstance(x, torch.Tensor) else x, data)
            _values[made] = plain(data, *args, **{**kwargs, "device": "cpu"})
        return made

    with mock.patch.object(torch, "tensor", tensor):
        yield


def value_of(tensor: Any) -> torch.Tensor | None:
    """The values of a tensor without storage, on the CPU; None where they are not known."""
    return _values.get(tensor) if isinstance(tensor, torch.Tensor) else None


def has_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that looks at values has them all."""
    return func in BY_VALUE and all(value_of(t) is not None for t in _tensors((args, kwargs)))


def by_value(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of such an operation, on meta."""
    found = _on_cpu(func, args, kwargs)
    return tree_map(lambda x: on_meta(x) if isinstance(x, torch.Tensor) else x, found)


def follow(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    """Note the values of an operation's result where those of its operands are known.

    An operand that was written to with values that are not known has none from then on.
    """
    if func.namespace == "c10d":  # what another rank sends is not known here
        for tensor in _tensors((args, kwargs)):
            _values.pop(tensor, None)
        return
    if not _values and not _makes_integers(kwargs):
        return
    first = args[0] if args and len(_nowhere_zero) else None
    if isinstance(first, torch.Tensor) and first in _nowhere_zero:
        _follow_pixels(func, args, out)
        return
    results = [out] if isinstance(out, torch.Tensor) else list(_tensors(out))
    # most operations, before their operands are looked through
    if func in WITHOUT_VALUES or not results or not all(map(_is_integer, results)):
        return
    # what is worked out of a larger input of the batch is followed like it
    most = max(
        (_held(v) for t in _tensors((args, kwargs)) if (v := value_of(t)) is not None), default=0
    )
    # an expanded mask takes no memory, and its true places may be asked for
    if func is not aten.expand.default and not all(
        _is_small_integer(t, max(most, MOST_ELEMENTS)) for t in results
    ):
        return
    known = all(t.device.type == "cpu" or t in _values for t in _tensors((args, kwargs)))
    found = list(_tensors(_on_cpu(func, args, kwargs))) if known else []
    for made, value in zip(results, found, strict=False):
        if made not in _values:
            _values[made] = value
    if not known:
        for written in results:
            _values.pop(written, None)


def _follow_pixels(func: Any, args: tuple[Any, ...], out: Any) -> None:
    if func in SAME_CONTENT:
        _nowhere_zero[out] = True
    elif func is aten.eq.Scalar and args[1] == 0:
        _values[out] = torch.zeros((), dtype=torch.bool).expand(out.shape)


def _held(value: torch.Tensor) -> int:
    """Elements that a value takes in memory."""
    return value.untyped_storage().nbytes() // value.element_size()


def _makes_integers(kwargs: Mapping[str, Any]) -> bool:
    return "device" in kwargs


def _is_small_integer(tensor: torch.Tensor, most: int = MOST_ELEMENTS) -> bool:
    return _is_integer(tensor) and tensor.numel() <= most


def _is_integer(tensor: torch.Tensor) -> bool:
    plain = not (tensor.is_floating_point() or tensor.is_complex())
    return plain and tensor.device.type == "meta"


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor))


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    def real(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return _values.get(x, x)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    with torch._C.DisableTorchFunction():
        try:
            return func(*tree_map(real, args), **tree_map(real, dict(kwargs)))
        except (NotImplementedError, RuntimeError, IndexError):  # CUDA alone has it
            return ()
