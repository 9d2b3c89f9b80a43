"""One forward of a model as a list of operations: what each reads and makes, where it runs, and when
Python lets go of each storage."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from napkinmath_profiler.tracing.learning import known_results
from napkinmath_profiler.tracing.module_paths import ModulePaths, next_sequence
from napkinmath_profiler.tracing.op_handlers import OpHandlers
from napkinmath_profiler.tracing.storage_events import TracePhase

CONSTANT = "constant"
"""A tensor of numbers that the code has written out."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The place of a tensor argument: the number of a recorded value."""

    value: int


@dataclass(slots=True)
class RecordedValue:
    """A tensor as an operation read or made it; `name` where it was there before the forward."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    name: str = ""
    needs_grad: bool = False


@dataclass(slots=True)
class RecordedOp:
    """One operation. `func` is None for a named composite, whose `facts` say how it was called;
    `node` is the sequence number of its autograd node."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    module: str
    facts: dict[str, Any] = field(default_factory=dict)
    node: int = -1


class ForwardRecorder(TorchDispatchMode):
    """Records the operations of one forward on meta tensors; `died` says after which of them each
    storage went."""

    def __init__(self, model: nn.Module, paths: ModulePaths) -> None:
        super().__init__()
        self.paths = paths
        self.ops: list[RecordedOp] = []
        self.values: list[RecordedValue] = []
        self.died: dict[int, int] = {}
        self.result: int | None = None  # the loss, where the forward computes it
        self.hidden: int | None = None  # a bare encoder's last hidden states
        self.phase = TracePhase.FORWARD  # asked for by the handlers of operations
        self.inner: list[str] = []
        self.in_place = False  # a function that writes over its input is under way
        self._depth = 0
        self._handlers = OpHandlers(Counter()).table(cuda=True)
        self._value_of: dict[tuple[Any, ...], int] = {}
        self._storages: dict[int, int] = {}
        self._num_storages = 0
        self._references: list[weakref.ref[Any]] = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._register(tensor, f"w:{name}")

    def name(self, tensor: torch.Tensor, name: str) -> int:
        """Registers a tensor that is there before the forward."""
        return self._register(tensor, name)

    @contextmanager
    def composite(self) -> Generator[None]:
        """What runs inside is one operation that the caller records: its own are not."""
        if not self._depth:
            self.inner = []
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def inside_composite(self) -> bool:
        """Whether a composite is under way."""
        return self._depth > 0

    def add(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **facts: Any
    ) -> None:
        """Records a composite."""
        read = [self._read(x) for x in inputs]
        made = [self._register(x) for x in outputs]
        self.ops.append(RecordedOp(name, None, (), {}, read, made, self.paths.current, dict(facts)))

    def _read(self, tensor: torch.Tensor) -> int:
        if not tensor.is_floating_point() and self._key(tensor) not in self._value_of:
            self.add(CONSTANT, [], [tensor])  # numbers that indexing by a list makes a tensor
        number = self.value(tensor)
        self.values[number].needs_grad |= tensor.requires_grad
        return number

    def value(self, tensor: torch.Tensor) -> int:
        """The number of the value that a tensor is."""
        found = self._value_of.get(self._key(tensor))
        return self._register(tensor) if found is None else found

    def _key(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (
            self._storage(tensor),
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = self._num_storages
            self._num_storages += 1

            def gone(_: Any, key: int = key, number: int = found) -> None:
                if self._storages.get(key) == number:
                    del self._storages[key]
                self.died[number] = len(self.ops) - 1

            self._references.append(weakref.ref(storage, gone))
        return found

    def _register(self, tensor: torch.Tensor, name: str = "") -> int:
        self.values.append(
            RecordedValue(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.dtype,
                self._storage(tensor),
                name,
                tensor.requires_grad,
            )
        )
        number = len(self.values) - 1
        self._value_of[self._key(tensor)] = number
        return number

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation and records it, unless it is part of a composite."""
        kwargs = kwargs or {}
        handler = self._handlers.get(func)

        def run() -> Any:
            if handler is None:
                return known_results.run(func, args, kwargs)
            return handler(self, func, args, kwargs)

        if self._depth:
            self.inner.append(str(func))
            return run()
        own = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
        if func is own[0] or (self.in_place and func is own[1]):
            return (
                run()
            )  # autograd's own: of results that it keeps, of inputs that are written over
        return self._recorded(func, args, kwargs, run)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        read: list[int] = []

        def place(item: Any) -> Any:
            if not isinstance(item, torch.Tensor) or item.device.type != "meta":
                return item
            number = self._read(item)
            read.append(number)
            return Ref(number)

        places, named = tree_map(place, args), tree_map(place, kwargs)
        node = next_sequence() - 1
        op = RecordedOp(str(func), func, places, named, read, [], self.paths.current, node=node)
        self._depth += 1  # a handler may run operations of its own
        try:
            out = run()
        finally:
            self._depth -= 1
        self.ops.append(op)
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.device.type == "meta":
                op.outputs.append(self._register(item))
        return out
