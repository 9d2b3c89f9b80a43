"""What ran between which events of the allocator's history: phases, modules and owners, noted while
a step runs.

Nothing here changes what the step allocates. Modules announce themselves by hooks, saved tensors by
autograd's hooks for them (so a backward node is known by the module whose forward saved what it
reads), gradients as they are accumulated, optimizer states after the step. Each note carries the
allocator's own count of events, so no clock has to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from napkinmath_profiler.measuring.device_memory import DeviceMemory
from napkinmath_profiler.tracing.observation import mark_persistent
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase


class Place(NamedTuple):
    """What the program does from event ``position`` on."""

    position: int
    phase: TracePhase
    module: str
    step: int
    micro_step: int
    scope: int
    of_loss: bool


class Claim(NamedTuple):
    """At event ``position`` the block at ``address`` held ``name``."""

    position: int
    address: int
    nbytes: int
    role: StorageRole
    name: str


@dataclass(slots=True)
class _Saved:
    """A tensor kept for the backward, and where it was saved."""

    tensor: torch.Tensor
    module: str
    of_loss: bool


class HistoryMarks:
    """Collects places and claims while a loop runs; ``phase_begins`` is to be called at each
    phase."""

    def __init__(self, model: nn.Module, memory: DeviceMemory) -> None:
        self._model, self._memory = model, memory
        self._names: dict[int, str] = {}
        for path, module in model.named_modules():
            self._names.setdefault(id(module), path)
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._stack: list[str] = [""]
        self._phase, self._step, self._micro_step, self._scope = TracePhase.SETUP, 0, 0, 0
        self.places: list[Place] = []
        self.claims: list[Claim] = []
        self.saved: list[tuple[int, int]] = []
        self._is_on = False

    # ------------------------------------------------------------ claims: who holds what

    def mark(self, tensor: torch.Tensor | None, role: StorageRole, name: str = "") -> None:
        """Say what holds ``tensor``'s storage now."""
        if isinstance(tensor, torch.Tensor) and (address := self._memory.address_of(tensor)):
            self.claims.append(
                Claim(self._position(), address, tensor.untyped_storage().nbytes(), role, name)
            )

    def mark_all(self, named: Iterable[tuple[str, torch.Tensor]], role: StorageRole) -> None:
        """``mark`` for each (name, tensor) pair."""
        for name, tensor in named:
            self.mark(tensor, role, name)

    def mark_present(
        self, inputs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Claim what is there before the first step."""
        mark_persistent(self._model, inputs, self)  # type: ignore[arg-type]
        if optimizer is not None:
            self._claim_states(optimizer)

    def _position(self) -> int:
        return self._memory.position() if self._is_on else 0

    def _claim_states(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            owner = self._parameters.get(id(parameter), "?")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self.mark(value, StorageRole.OPTIMIZER_STATES, f"{owner}.{key}")

    # ------------------------------------------------------------ places: what runs

    def phase_begins(self, phase: TracePhase) -> None:
        """The loop enters ``phase``; a forward after an update is the next step's, after a backward
        the next micro-step's."""
        if phase is TracePhase.FORWARD:
            if self._phase in (TracePhase.ZERO_GRAD, TracePhase.OPTIMIZER):
                self._step, self._micro_step = self._step + 1, 0
            elif self._phase is TracePhase.BACKWARD:
                self._micro_step += 1
        self._phase = phase
        self._scope += 1
        self._place(self._stack[-1])

    def _place(self, module: str, *, of_loss: bool = False) -> None:
        phase = (
            TracePhase.RECOMPUTE
            if self._phase is TracePhase.BACKWARD and len(self._stack) > 1
            else self._phase
        )
        self.places.append(
            Place(
                self._position(), phase, module, self._step, self._micro_step, self._scope, of_loss
            )
        )

    def _module_begins(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            if len(self._stack) == 1 and self._phase is TracePhase.BACKWARD:
                self._scope += 1
            self._stack.append(name)
            self._place(name)

    def _module_ends(self, module: nn.Module, *_: Any) -> None:
        name = self._names.get(id(module))
        if name is None or len(self._stack) == 1:
            return
        self._stack.pop()
        if (
            len(self._stack) == 1 and self._phase is TracePhase.BACKWARD
        ):  # a recompute ends: what follows is that part's backward
            self._scope += 1
            self._place(name)
        else:
            self._place(self._stack[-1])

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if address := self._memory.address_of(tensor):
            self.saved.append((self._position(), address))
        # Detached: a node that saved its own output would keep itself alive through it, for good
        # where no backward comes to free it.
        return _Saved(tensor.detach(), self._stack[-1], self._phase is TracePhase.LOSS)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if self._phase is TracePhase.BACKWARD and len(self._stack) == 1:
            self._scope += 1
            self._place(saved.module, of_loss=saved.of_loss)
        return saved.tensor

    def _gradient_marker(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self.mark(parameter.grad, StorageRole.GRADIENTS, name)

    @contextmanager
    def listening(self) -> Generator[None]:
        """Take notes inside the block."""
        self._is_on = True
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._module_begins).remove)
            stack.callback(register_module_forward_hook(self._module_ends, always_call=True).remove)
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    stack.callback(
                        parameter.register_post_accumulate_grad_hook(
                            self._gradient_marker(name)
                        ).remove
                    )
            stack.callback(
                register_optimizer_step_post_hook(
                    lambda optimizer, *_: self._claim_states(optimizer)
                ).remove
            )
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            yield
