"""CUDA's autocast on the meta device, by the op lists of the installed PyTorch.

Meta tensors carry no autocast dispatch key, so ``torch.autocast("cuda")`` would leave them alone.
Here the ``AutocastCUDA`` key is switched on for the thread (it is excluded again whenever autocast
is disabled, which is how PyTorch itself turns autocast off). The listed ops get kernels that
cast meta tensors as CUDA's cast CUDA tensors.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import checkpoint

AUTOCAST_HEADER = "ATen/autocast_mode.h"
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCUDA)
CASTING_LISTS = ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE")


@cache
def autocast_lists() -> dict[str, tuple[str, ...]]:
    """List name -> op names (``name`` or ``name.overload``), read from the header the installed
    torch ships."""
    header = Path(torch.__file__).parent / "include" / AUTOCAST_HEADER
    if not header.exists():
        raise FileNotFoundError(
            f"{header} is missing, so CUDA's autocast lists are unknown; reinstall torch with its"
            " headers"
        )
    text = header.read_text()
    lists: dict[str, tuple[str, ...]] = {}
    for name in CASTING_LISTS:
        body = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", text)
        if body is None:
            raise ValueError(
                f"{header} has no list AT_FORALL_{name}; this torch version is not understood"
            )
        entries = re.findall(r"\b_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
        lists[name] = tuple(f"{op}.{overload}" if overload else op for op, overload in entries)
    return lists


class MetaAutocast:
    """The casting rules and the weight cache of ``aten/src/ATen/autocast_mode.cpp``, for meta
    tensors."""

    def __init__(self) -> None:
        self.num_casting_calls = 0
        self._cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        """What ``torch.clear_autocast_cache`` does."""
        self._cache.clear()

    def _eligible(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == "meta"
            and value.is_floating_point()
            and value.dtype != torch.float64
        )

    def _cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._cast(item, dtype) for item in value]
        if dtype is None or not self._eligible(value) or value.dtype == dtype:
            return value
        cacheable = (
            value.dtype == torch.float32
            and dtype == torch.get_autocast_dtype("cuda")
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cacheable:
            return value.to(dtype)
        found = self._cache.get(id(value))
        if found is not None and found[0]() is value:
            return found[1]
        casted = value.to(dtype)
        self._cache[id(value)] = (weakref.ref(value), casted)
        return casted

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (list, tuple)):
                yield from (item for item in value if self._eligible(item))
            elif self._eligible(value):
                yield value

    def _target(
        self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        if kind == "LOWER_PRECISION_FP":
            return torch.get_autocast_dtype("cuda")
        if kind == "FP32":
            return torch.float32
        is_wide = any(t.dtype == torch.float32 for t in self._tensors(args, kwargs))
        return torch.float32 if is_wide else torch.get_autocast_dtype("cuda")

    def kernel(self, op: Any, kind: str) -> Callable[..., Any]:
        """The function to register for ``op`` under the autocast key."""
        schema = op._schema
        dtype_index = next((i for i, a in enumerate(schema.arguments) if a.name == "dtype"), None)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.num_casting_calls += 1
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                if kind == "FP32_SET_OPT_DTYPE":
                    given = kwargs.get("dtype") or (
                        args[dtype_index]
                        if dtype_index is not None and dtype_index < len(args)
                        else None
                    )
                    if self._eligible(args[0]) and given is None:
                        args = args[:dtype_index]
                        kwargs = {**kwargs, "dtype": torch.float32}
                    return op(*args, **kwargs)
                dtype = self._target(kind, args, kwargs)
                cast_args = [self._cast(a, dtype) for a in args]
                return op(*cast_args, **{k: self._cast(v, dtype) for k, v in kwargs.items()})

        return run


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


@contextmanager
def meta_autocast() -> Generator[MetaAutocast]:
    """Make ``torch.autocast("cuda", ...)`` act on meta tensors inside the block, as it acts on CUDA
    tensors."""
    autocast = MetaAutocast()
    library = torch.library.Library("aten", "IMPL")
    original_clear = torch.clear_autocast_cache

    def clear() -> None:
        autocast.clear()
        original_clear()

    with ExitStack() as stack:
        _register(library, autocast)
        stack.callback(library._destroy)
        stack.enter_context(mock.patch("torch.clear_autocast_cache", clear))
        stack.enter_context(
            mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        )
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        _treat_meta_as_cuda(stack)
        torch._C._dispatch_tls_set_dispatch_key_included(DispatchKey.AutocastCUDA, True)
        stack.callback(
            torch._C._dispatch_tls_set_dispatch_key_included, DispatchKey.AutocastCUDA, False
        )
        yield autocast


def _register(library: Any, autocast: MetaAutocast) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is what we are here for
        for kind, names in autocast_lists().items():
            for name in names:
                op = _overload(name)
                if op is not None:
                    library.impl(op, autocast.kernel(op, kind), "AutocastCUDA", allow_override=True)


def _asked_of_cuda(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *device_type: ask(*("cuda" if name == "meta" else name for name in device_type))


def _treat_meta_as_cuda(stack: ExitStack) -> None:
    """Code that asks a tensor's device for its autocast state must hear CUDA's: checkpointing,
    RoPE, parametrizations."""

    initialize = torch.autocast.__init__

    def initialize_for_cuda(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    stack.enter_context(mock.patch.object(torch.autocast, "__init__", initialize_for_cuda))
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        stack.enter_context(mock.patch.object(torch, name, _asked_of_cuda(getattr(torch, name))))

    infer = checkpoint._infer_device_type
    stack.enter_context(
        mock.patch.object(
            checkpoint,
            "_infer_device_type",
            lambda *args: "cuda" if (found := infer(*args)) == "meta" else found,
        )
    )
    generic = sys.modules.get("transformers.utils.generic")
    original = getattr(generic, "maybe_autocast", None)
    if original is None:
        return

    def maybe_autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cuda" if device_type == "meta" else device_type, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and module.__dict__.get("maybe_autocast") is original:
            stack.enter_context(mock.patch.object(module, "maybe_autocast", maybe_autocast))
