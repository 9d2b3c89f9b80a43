"""Calls that are recorded as one operation, because the estimator lowers them by the configuration:
linears, embeddings, attention, masks, dropout."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from napkinmath_profiler.tracing.learning.forward_recorder import ForwardRecorder
from napkinmath_profiler.tracing.trace_errors import TraceError

LINEAR, EMBEDDING, DROPOUT, ATTEND, SDPA, MASK, LEAF = (
    "linear",
    "embedding",
    "dropout",
    "attend",
    "sdpa",
    "mask",
    "leaf",
)
FULL, SLIDING = "full mask", "sliding mask"
COPIES = ("aten.clone.default", "aten._reshape_copy.default", "aten.contiguous.default")
# Arguments of transformers' attention functions that change what they make.
MEMORY_ARGUMENTS = frozenset({"dropout", "softcap", "s_aux", "position_bias"})


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is one operation of a recording: transformers' attention functions, its masks.

    `keeps_type`: linears but the head hand back the type that they are given. `loss`: the class is
    given labels and computes its loss.
    """

    attention: bool = True
    masks: bool = True
    keeps_type: bool = False
    loss: bool = False


class _Functions(TorchFunctionMode):
    """Catches the functions that are one operation."""

    def __init__(self, recorder: ForwardRecorder, keeps_type: bool, head: nn.Module | None) -> None:
        super().__init__()
        self._recorder = recorder
        self._narrow = getattr(head, "weight", None)
        self._keeps_type = keeps_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = None if self._recorder.inside_composite else _HANDLERS.get(func)
        if handler is None:
            return self._plain(func, args, kwargs)
        if func is F.linear and self._keeps_type and isinstance(args[1], nn.Parameter):
            return _linear(self._recorder, self._of_input_type, args, kwargs)
        if func is torch.addmm and self._keeps_type:
            return _conv1d(self._recorder, _added_in_input_type, args, kwargs)
        return handler(self._recorder, func, args, kwargs)

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        outer = self._recorder.in_place
        self._recorder.in_place = outer or (name.endswith("_") and not name.endswith("__"))
        self._recorder.in_place |= name.startswith("__i")
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.in_place = outer

    def _of_input_type(
        self, x: torch.Tensor, weight: torch.Tensor, *bias: Any, **named: Any
    ) -> Any:
        out = F.linear(x, weight, *bias, **named)
        return out if weight is self._narrow else out.to(x.dtype)


def _added_in_input_type(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, weight).to(x.dtype)


def _linear(recorder: ForwardRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if not isinstance(weight, nn.Parameter):
        return func(*args, **kwargs)
    with recorder.composite():
        out = func(*args, **kwargs)
        copies = any(name in COPIES for name in recorder.inner)
    read: list[torch.Tensor] = [x, weight] if bias is None else [x, weight, bias]
    recorder.add(LINEAR, read, [out], copies=copies)
    return out


def _conv1d(recorder: ForwardRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`addmm` of transformers' Conv1D, a linear whose weight is transposed."""
    if len(args) != 3 or kwargs or not isinstance(args[2], nn.Parameter):
        return func(*args, **kwargs)
    bias, x, weight = args
    with recorder.composite():
        out = func(bias, x, weight)
    recorder.add(LINEAR, [x, weight, bias], [out], copies=False)
    return out


def _embedding(recorder: ForwardRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(F.embedding).bind(*args, **kwargs).arguments
    ids, weight = bound["input"], bound["weight"]
    if not isinstance(weight, nn.Parameter):
        return func(*args, **kwargs)
    with recorder.composite():
        out = func(*args, **kwargs)
    recorder.add(EMBEDDING, [ids, weight], [out])
    return out


def _dropout(recorder: ForwardRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(F.dropout).bind(*args, **kwargs).arguments
    if not bound.get("p", 0.5) or not bound.get("training", True):
        return bound["input"]
    with recorder.composite():
        out = func(*args, **kwargs)
    recorder.add(DROPOUT, [bound["input"]], [out], p=float(bool(bound.get("p", 0.5))))
    return out


def _sdpa(recorder: ForwardRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = bound["query"], bound["key"], bound["value"]
    mask = bound.get("attn_mask")
    with recorder.composite():
        out = func(*args, **kwargs)
    recorder.add(
        SDPA,
        [query, key, value, *([] if mask is None else [mask])],
        [out],
        p=float(bool(bound.get("dropout_p", 0.0))),
        causal=bool(bound.get("is_causal", False)),
        grouped=bool(bound.get("enable_gqa", False)),
    )
    return out


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _conv1d,
    F.embedding: _embedding,
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _sdpa,
}


@contextmanager
def composites(recorder: ForwardRecorder, model: Any, how: Recorded) -> Generator[None]:
    """Records the composites of ``model``'s forward inside the block."""
    with ExitStack() as stack:
        head = model.get_output_embeddings() if how.keeps_type else None
        stack.enter_context(_Functions(recorder, how.keeps_type, head))
        for embedding in embeddings_of(model):
            hook = embedding.register_forward_hook(_leaf(recorder))
            stack.callback(hook.remove)
        if how.attention:
            stack.enter_context(_attention(recorder))
        if how.masks:
            stack.enter_context(_masks(recorder, model, given=not how.attention))
        yield


def embeddings_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose output `enable_input_require_grads` makes need a gradient, the model's own
    first (transformers 5.23 modeling_utils.py)."""
    found: list[nn.Module] = []
    for module in model.modules():
        if not hasattr(module, "get_input_embeddings"):
            continue
        try:
            embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:
            continue
        if isinstance(embedding, nn.Module) and all(embedding is not one for one in found):
            found.append(embedding)
    return found


def _leaf(recorder: ForwardRecorder) -> Callable[..., None]:
    """Where `enable_input_require_grads` makes the embeddings need a gradient."""

    def note(module: Any, given: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and not recorder.inside_composite:
            recorder.add(LEAF, [out], [out])

    return note


# ------------------------------------------------------------------ attention


@contextmanager
def _attention(recorder: ForwardRecorder) -> Generator[None]:
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface

    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Any:
        return _attending(recorder, original(self, implementation, default))

    with mock.patch.object(AttentionInterface, "get_interface", get_interface):
        yield


def _attending(recorder: ForwardRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        window, is_mask = _window_of(attention_mask)
        extra = {name: x for name, x in kwargs.items() if _matters(name, x)}
        known = not set(extra) - {"dropout", "softcap"} and is_mask
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        plain = causal or attention_mask is None
        if recorder.inside_composite or not known or not plain:
            return function(module, query, key, value, attention_mask, **kwargs)
        with recorder.composite():
            out, weights = function(module, query, key, value, attention_mask, **kwargs)
        recorder.add(
            ATTEND,
            [query, key, value],
            [out],
            window=window,
            p=float("dropout" in extra),
            capped="softcap" in extra,
            contiguous=bool(query.is_contiguous()),
            grouped=int(getattr(module, "num_key_value_groups", 1)) != 1,
            **({} if causal else {"bidirectional": True}),
        )
        return out, weights

    return attend


def _matters(name: str, value: Any) -> bool:
    if name not in MEMORY_ARGUMENTS or value is None:
        return False
    return isinstance(value, torch.Tensor) or value != 0


def _window_of(mask: Any) -> tuple[int, bool]:
    """(window, whether it is one of the masks that this module made)."""
    if mask is None:
        return 0, True
    window = getattr(mask, "learned_window", None)
    return (0, False) if window is None else (window, True)


# ------------------------------------------------------------------ masks


@contextmanager
def _masks(recorder: ForwardRecorder, model: nn.Module, *, given: bool) -> Generator[None]:
    """The functions of transformers' masking_utils that the model's own module has imported.

    `given`: a full mask is a tensor, as eager attention has it; else none is needed.
    """
    modules = {type(part).__module__ for part in model.modules()}
    with ExitStack() as stack:
        for module in (sys.modules[name] for name in modules if name in sys.modules):
            for name, made in _MASKS.items():
                if hasattr(module, name):
                    replacement = functools.partial(made, recorder, given)
                    stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _full(recorder: ForwardRecorder, given: bool, *args: Any, **kwargs: Any) -> Any:
    _refuse_functions(kwargs)
    recorder.add(MASK, [], [], window=0, label=FULL)
    return _tensor(recorder, kwargs, FULL) if given else None


def _sliding(recorder: ForwardRecorder, given: bool, *args: Any, **kwargs: Any) -> Any:
    _refuse_functions(kwargs)
    config = kwargs["config"] if "config" in kwargs else args[0]
    window = int(config.sliding_window)
    recorder.add(MASK, [], [], window=window, label=SLIDING)
    mask = _tensor(recorder, kwargs, SLIDING)
    mask.learned_window = window
    return mask


def _tensor(recorder: ForwardRecorder, kwargs: dict[str, Any], label: str) -> Any:
    states = kwargs.get("inputs_embeds")
    if states is None:
        raise TraceError("its mask is made from no embeddings")
    rows, length = states.shape[:2]
    with recorder.composite():
        mask = torch.empty((rows, 1, length, length), dtype=states.dtype, device="meta")
    recorder.name(mask, label)
    return mask


def _refuse_functions(kwargs: dict[str, Any]) -> None:
    for name in ("or_mask_function", "and_mask_function", "block_sequence_ids"):
        if kwargs.get(name) is not None:
            raise TraceError(f"its mask is made by a function of its own ({name})")
    if kwargs.get("allow_is_causal_skip") is False:
        raise TraceError("its layers read a mask where attention alone would need none")


def _nothing(recorder: ForwardRecorder, given: bool, *args: Any, **kwargs: Any) -> None:
    """No padding, no mask."""


def _other(recorder: ForwardRecorder, given: bool, *args: Any, **kwargs: Any) -> None:
    raise TraceError("its attention sees chunks, for which the learned form has no mask")


_MASKS: dict[str, Callable[..., Any]] = {
    "create_causal_mask": _full,
    "create_sliding_window_causal_mask": _sliding,
    "create_recurrent_attention_mask": _nothing,
    "create_chunked_causal_mask": _other,
}
