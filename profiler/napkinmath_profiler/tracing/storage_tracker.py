"""The dispatch mode that sees every storage of one device type born and die."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from napkinmath_profiler.tracing.module_paths import ModulePaths
from napkinmath_profiler.tracing.storage_events import StorageEvent, StorageRecord, StorageRole, TracePhase

Handler = Callable[["StorageTracker", Any, tuple[Any, ...], dict[str, Any]], Any]


class StorageTracker(TorchDispatchMode):
    """Registers each new storage on ``device_type`` and a weak reference whose callback records its death.

    ``handlers`` maps an op overload to a function run in its place (CUDA's choices). The tracker itself makes none.
    """

    def __init__(self, device_type: str, paths: ModulePaths, handlers: dict[Any, Handler] | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.paths = paths
        self.handlers = handlers or {}
        self.records: list[StorageRecord] = []
        self.events: list[StorageEvent] = []
        self.phase = TracePhase.SETUP
        self.step = 0
        self.micro_step = 0
        self.num_ops = 0
        self._live: dict[int, StorageRecord] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._scope = 0
        self._scope_key: tuple[Any, ...] = ()
        self._op = ""
        self._module = ""
        self._op_phase = TracePhase.SETUP

    def set_phase(self, phase: TracePhase) -> None:
        """Say what the program does from now on."""
        self.phase = phase
        self._locate(None)

    def _locate(self, node: Any) -> None:
        """Settle the phase, module and scope of the op being run; a scope is one backward node or one recompute."""
        paths = self.paths
        phase = self.phase
        if phase is TracePhase.BACKWARD:
            if paths.depth:
                phase, self._module = TracePhase.RECOMPUTE, paths.current
                key: tuple[Any, ...] = (phase, torch._C._current_graph_task_id())
            elif node is not None:
                self._module = paths.of_node(node)
                key = (phase, node._sequence_nr(), node.name())
            else:
                self._module, key = "", (phase,)
        else:
            self._module, key = paths.current, (phase, self.micro_step)
        if key != self._scope_key:
            self._scope_key = key
            self._scope += 1
        self._op_phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run ``func`` (or the handler given for it) and register the storages it made."""
        kwargs = kwargs or {}
        self.num_ops += 1
        self.paths.note_sequence()
        in_backward = torch._C._current_graph_task_id() != -1
        self._locate(torch._C._current_autograd_node() if in_backward else None)
        self._op = str(func)
        handler = self.handlers.get(func)
        out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
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
        return out

    def _register(self, tensor: torch.Tensor) -> StorageRecord | None:
        if tensor.device.type != self.device_type:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._live.get(key)
        if record is not None:
            return record
        record = StorageRecord(
            storage_id=len(self.records),
            requested_bytes=storage.nbytes(),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            op=self._op,
            module=self._module,
            phase=self._op_phase,
            step=self.step,
            micro_step=self.micro_step,
            born=len(self.events),
            scope=self._scope,
        )
        self.records.append(record)
        self._live[key] = record
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._died(key))
        self.events.append(StorageEvent(True, record.storage_id, record.phase, record.module, record.op, self.step, self.micro_step))
        return record

    def _died(self, key: int) -> None:
        record = self._live.pop(key, None)
        self._references.pop(key, None)
        if record is None:
            return
        record.died = len(self.events)
        record.died_phase, record.died_scope = self._op_phase, self._scope
        record.died_op, record.died_module = self._op, self._module
        self.events.append(StorageEvent(False, record.storage_id, self._op_phase, self._module, self._op, self.step, self.micro_step))

    def mark(self, tensor: torch.Tensor | None, role: StorageRole, name: str = "") -> None:
        """Say what holds ``tensor``'s storage, registering it first if it was there before the tracker."""
        if tensor is None:
            return
        record = self._register(tensor)
        if record is not None and record.role is None:
            record.role = role
            record.name = name

    def mark_all(self, named: Iterable[tuple[str, torch.Tensor]], role: StorageRole) -> None:
        """``mark`` for each (name, tensor) pair."""
        for name, tensor in named:
            self.mark(tensor, role, name)

    def workspace(self, num_bytes: int, name: str) -> None:
        """Record a kernel-internal buffer: born now and dead at once, which is how it meets the op's outputs."""
        if num_bytes <= 0:
            return
        identifier = len(self.records)
        record = StorageRecord(
            storage_id=identifier,
            requested_bytes=num_bytes,
            shape=(num_bytes,),
            dtype="uint8",
            op=self._op,
            module=self._module,
            phase=self._op_phase,
            step=self.step,
            micro_step=self.micro_step,
            born=len(self.events),
            scope=self._scope,
            role=StorageRole.WORKSPACE,
            name=name,
        )
        self.records.append(record)
        where = (self._op_phase, self._module, self._op, self.step, self.micro_step)
        self.events.append(StorageEvent(True, identifier, *where))
        record.died, record.died_phase, record.died_scope = len(self.events), self._op_phase, self._scope
        record.died_op, record.died_module = self._op, self._module
        self.events.append(StorageEvent(False, identifier, *where))

    def stop(self) -> None:
        """Forget the storages still alive, so that what is freed later is not part of the trace."""
        self._references.clear()
        self._live.clear()
