"""The dispatch mode that sees every storage of one device type born and die."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from napkinmath_profiler.tracing.meta_results import on_meta
from napkinmath_profiler.tracing.module_paths import ModulePaths, repeated_module
from napkinmath_profiler.tracing.real_values import by_value, follow, has_values
from napkinmath_profiler.tracing.storage_events import (
    StorageEvent,
    StorageRecord,
    StorageRole,
    TracePhase,
)

ADD = torch.ops.aten.add.Tensor
PER_PARAMETER_PHASES = frozenset({TracePhase.CLIP, TracePhase.OPTIMIZER})
# Wrappers around a collective's result: on a real device another view of it, on meta an empty copy.
IDENTITIES = frozenset({"_c10d_functional._wrap_tensor_autograd.default"})
Handler = Callable[["StorageTracker", Any, tuple[Any, ...], dict[str, Any]], Any]
# (arguments, result) of an operation -> names and bytes of the buffers inside its kernel.
Workspaces = Callable[[tuple[Any, ...], Any], list[tuple[str, int]]]


@dataclass(slots=True)
class _PendingSum:
    """A sum of two gradients whose fate is open: its record is the first operand's if that dies
    before anything else is done."""

    key: int
    first: StorageRecord
    record: StorageRecord


class StorageTracker(TorchDispatchMode):
    """Registers each new storage on ``device_type`` and a weak reference whose callback records its
    death.

    ``handlers`` maps an op overload to a function run in its place (CUDA's choices). The tracker
    itself makes none.
    """

    active: StorageTracker | None = None
    """The tracker of the observation under way."""

    def __init__(
        self,
        device_type: str,
        paths: ModulePaths,
        handlers: dict[Any, Handler] | None = None,
        workspaces: dict[Any, Workspaces] | None = None,
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.paths = paths
        self.handlers = handlers or {}
        self.sums_in_place = False
        self.num_sums_in_place = 0
        self._sum: _PendingSum | None = None
        self.workspaces = workspaces or {}
        self.num_workspaces = 0
        self.records: list[StorageRecord] = []
        self.events: list[StorageEvent] = []
        self.phase = TracePhase.SETUP
        self.step = 0
        self.micro_step = 0
        self.num_ops = 0
        self.marks: dict[str, int] = {}
        self._live: dict[int, StorageRecord] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._scope = 0
        self._scope_key: tuple[Any, ...] = ()
        self._op = ""
        self._module = ""
        self._op_phase = TracePhase.SETUP
        self._op_in_loss = False

    @property
    def current_op(self) -> str:
        """Name of the op being run, or run last."""
        return self._op

    @property
    def current_module(self) -> str:
        """Dotted path of the module that op belongs to."""
        return self._module

    def set_phase(self, phase: TracePhase) -> None:
        """Say what the program does from now on; ``marks`` keeps the last event before each
        backward and after each step."""
        if phase is TracePhase.BACKWARD:
            self.marks[f"forward_end:{self.step}:{self.micro_step}"] = len(self.events) - 1
        elif phase is TracePhase.ZERO_GRAD:
            self.marks[f"step_end:{self.step}"] = len(self.events) - 1
        self.paths.note_sequence()
        self.paths.in_loss = phase is TracePhase.LOSS
        self.phase = phase
        self._locate(None)

    def _locate(self, node: Any) -> None:
        """Settle the phase, module and scope of the op being run; a scope is one backward node or
        one recompute."""
        phase = self.phase
        if phase is TracePhase.BACKWARD:
            phase, self._module, key = self._place_in_backward(node)
        else:
            self._module, key = self.paths.current, (phase, self.micro_step)
        if key != self._scope_key:
            self._scope_key = key
            self._scope += 1
        self._op_phase = phase
        is_of_node = phase is TracePhase.BACKWARD and node is not None
        self._op_in_loss = is_of_node and self.paths.is_of_loss(node)

    def _place_in_backward(self, node: Any) -> tuple[TracePhase, str, tuple[Any, ...]]:
        """Phase, module and key of the scope of an op that is run while the backward is."""
        paths = self.paths
        task = torch._C._current_graph_task_id()
        in_engine = task != -1
        # a checkpointed forward may be called without its module
        if paths.depth or (in_engine and torch.is_grad_enabled()):
            again = repeated_module(paths.of_node(node)) if node is not None else ""
            module = paths.current if paths.depth else again
            return TracePhase.RECOMPUTE, module, (TracePhase.RECOMPUTE, task)
        if node is not None:
            key = (TracePhase.BACKWARD, node._sequence_nr(), node.name())
            return TracePhase.BACKWARD, paths.of_node(node), key
        if not in_engine:
            return TracePhase.BETWEEN, "", (TracePhase.BETWEEN, self.micro_step)
        return TracePhase.BACKWARD, "", (TracePhase.BACKWARD,)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` (or the handler given for it) and register the storages it made."""
        if any(
            hasattr(kind, "__tensor_flatten__") and kind.__name__ == "DTensor" for kind in types
        ):
            return NotImplemented  # it runs its operations on the local tensors, which come by here
        self.num_ops += 1
        self.paths.note_sequence()
        before = self._module
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self.phase is not TracePhase.BACKWARD:
            self.set_phase(TracePhase.BACKWARD)
        node = torch._C._current_autograd_node() if in_backward else None
        self._locate(node)
        self._op = str(func)
        self._sum = None
        if self._op_phase in PER_PARAMETER_PHASES:
            self._module = self._updated_module(args, before)
        out = self._run(func, args, kwargs or {})
        is_sum = func is ADD and self.sums_in_place and in_backward
        if is_sum and self._op_phase is TracePhase.BACKWARD:
            self._register_sum(out, args[0], is_python_node=isinstance(node, BackwardCFunction))
        elif self._op_phase in PER_PARAMETER_PHASES:
            self._register_owned(out, args)
        else:
            self._register_all(out)
        workspace = self.workspaces.get(func)
        if workspace is not None:
            self._record_workspaces(workspace(args, out))
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._op in IDENTITIES and self.device_type == "meta":
            return args[0]
        handler = self.handlers.get(func)
        if self.device_type != "meta":
            return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if has_values(func, args, kwargs):
            return by_value(func, args, kwargs)
        out = on_meta(func, args, kwargs) if handler is None else handler(self, func, args, kwargs)
        follow(func, args, kwargs, out)
        return out

    def _register_sum(self, out: torch.Tensor, first: Any, *, is_python_node: bool) -> None:
        """The engine adds a gradient to another: in place, if nobody but the engine holds that one
        (see ``_died``).

        Formulas of autograd's own nodes add nothing out of place; a Python function may, but to
        what it made itself.
        """
        before = None
        if isinstance(first, torch.Tensor):
            before = self._live.get(first.untyped_storage()._cdata)
        record = self._register(out)
        if before is None or record is None or record is before:
            return
        is_new = record.born == len(self.events) - 1
        made_here = is_python_node and before.scope == self._scope
        if is_new and not made_here and _is_dense(first):
            self._sum = _PendingSum(out.untyped_storage()._cdata, before, record)

    def _take_over(self, pending: _PendingSum) -> None:
        """Undo the sum's birth: its storage is the first operand's, which lives on."""
        position = pending.record.born
        del self.events[position]
        for event in self.events[position:]:
            self.records[event.storage_id].died = (self.records[event.storage_id].died or 0) - 1
        assert self.records.pop() is pending.record
        self._live[pending.key] = pending.first
        self.num_sums_in_place += 1

    def _updated_module(self, args: tuple[Any, ...], before: str) -> str:
        """The module whose parameter an optimizer's op works on: none for all at once, the one
        before for what is not known."""
        if args and isinstance(args[0], (list, tuple)):
            return ""
        return self.owner_of(args[0] if args else None).rpartition(".")[0] or before

    def _register_owned(self, out: Any, args: tuple[Any, ...]) -> None:
        """Register outputs of an update, each owned by the parameter whose storage it was computed
        from."""
        source = args[0] if args else None
        outputs = out if isinstance(out, (list, tuple)) else [out]
        sources = (
            source
            if isinstance(source, (list, tuple)) and len(source) == len(outputs)
            else [source] * len(outputs)
        )
        for item, origin in zip(outputs, sources, strict=True):
            if isinstance(item, torch.Tensor):
                record = self._register(item)
                if record is not None and not record.owner and not record.name:
                    record.owner = self.owner_of(origin)

    def owner_of(self, tensor: Any) -> str:
        """Name of what holds ``tensor``'s storage, if known."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device_type:
            return ""
        tensor = getattr(tensor, "_local_tensor", tensor)
        record = self._live.get(tensor.untyped_storage()._cdata)
        return (record.owner or record.name) if record is not None else ""

    def _register_all(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._register(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._register(item)
                elif isinstance(item, (tuple, list)):
                    for inner in item:
                        if isinstance(inner, torch.Tensor):
                            self._register(inner)

    def _register(self, tensor: torch.Tensor) -> StorageRecord | None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        tensor = getattr(tensor, "elem", tensor)  # what an AsyncCollectiveTensor wraps
        if tensor.device.type != self.device_type:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._live.get(key)
        if record is not None:
            return record
        record = self._new_record(
            storage.nbytes(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        )
        self._live[key] = record
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._died(key))
        return record

    def _died(self, key: int) -> None:
        record = self._live.pop(key, None)
        self._references.pop(key, None)
        if record is None:
            return
        pending = self._sum
        if pending is not None and pending.first is record:
            self._sum = None
            self._take_over(pending)
        else:
            self._bury(record)

    def note_resize(self, tensor: torch.Tensor) -> None:
        """A storage changed its size in place (FSDP's gathered parameters): the old one is dead, a
        new one born unless it is empty."""
        self._died(tensor.untyped_storage()._cdata)
        if tensor.untyped_storage().size():
            self._register(tensor)

    def mark(self, tensor: torch.Tensor | None, role: StorageRole, name: str = "") -> None:
        """Say what holds ``tensor``'s storage, registering it first if it was there before the
        tracker."""
        if tensor is None:
            return
        record = self._register(tensor)
        if record is not None and record.role is None:
            record.role = role
            record.name = record.owner = name

    def mark_managed(self, tensor: torch.Tensor) -> None:
        """Say that ``tensor`` lives in unified memory: it takes none of the allocator's."""
        record = self._register(tensor)
        if record is not None and not record.managed_bytes:
            record.managed_bytes, record.requested_bytes = record.requested_bytes, 0

    def mark_all(self, named: Iterable[tuple[str, torch.Tensor]], role: StorageRole) -> None:
        """``mark`` for each (name, tensor) pair."""
        for name, tensor in named:
            self.mark(tensor, role, name)

    def _record_workspaces(self, requests: list[tuple[str, int]]) -> None:
        """Record kernel-internal buffers: all born beside the op's outputs, then all dead."""
        made = [
            self._new_record(num_bytes, (num_bytes,), "uint8", name)
            for name, num_bytes in requests
            if num_bytes > 0
        ]
        self.num_workspaces += len(made)
        for record in made:
            record.role = StorageRole.WORKSPACE
        for record in made:
            self._bury(record)

    def _note(self, record: StorageRecord, *, is_allocation: bool) -> None:
        self.events.append(
            StorageEvent(
                is_allocation,
                record.storage_id,
                self._op_phase,
                self._module,
                self._op,
                self.step,
                self.micro_step,
            )
        )

    def _new_record(
        self, num_bytes: int, shape: tuple[int, ...], dtype: str, name: str = ""
    ) -> StorageRecord:
        record = StorageRecord(
            storage_id=len(self.records),
            requested_bytes=num_bytes,
            shape=shape,
            dtype=dtype,
            op=self._op,
            module=self._module,
            phase=self._op_phase,
            step=self.step,
            micro_step=self.micro_step,
            born=len(self.events),
            scope=self._scope,
            name=name,
            of_loss=self._op_in_loss,
        )
        self.records.append(record)
        self._note(record, is_allocation=True)
        return record

    def _bury(self, record: StorageRecord) -> None:
        record.died = len(self.events)
        record.died_phase, record.died_scope = self._op_phase, self._scope
        record.died_op, record.died_module = self._op, self._module
        self._note(record, is_allocation=False)

    def stop(self) -> None:
        """Forget the storages still alive, so that what is freed later is not part of the trace."""
        self._references.clear()
        self._live.clear()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` fills its memory without overlap, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1),
        key=lambda item: item[1],
    ):
        if stride != expected:
            return False
        expected *= size
    return True
