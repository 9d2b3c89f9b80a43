"""Finds out what a training loop is doing by itself: from calls of the root module, the
engine and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from napkinmath_profiler.tracing.module_paths import ModulePaths
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.storage_tracker import StorageTracker


class StepPhases:
    """Moves the tracker's phase, step and micro-step as the loop goes: forward, loss, backward,
    clip, optimizer, zero_grad.

    A call of the root module outside backward starts a forward; after an optimizer step it starts
    the next step, after a backward the next micro-step. What follows the output head inside a
    forward is the loss.
    """

    def __init__(self, model: nn.Module, tracker: StorageTracker, paths: ModulePaths) -> None:
        self._model, self._tracker, self._paths = model, tracker, paths
        self._names = {id(p): name for name, p in model.named_parameters()}

    @contextmanager
    def followed(self) -> Generator[None]:
        """Follow the loop inside the block."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(self._paths, "on_root_call", self._root_called))
            for hook in self._hooks():
                stack.callback(hook.remove)
            for owner in (nn.utils, nn.utils.clip_grad):
                clipping = self._clipping(owner.clip_grad_norm_)
                stack.enter_context(mock.patch.object(owner, "clip_grad_norm_", clipping))
            yield

    def _hooks(self) -> Iterator[RemovableHandle]:
        """Registered one by one, as they are asked for."""
        head = output_head(self._model)
        if head is not None:
            yield head.register_forward_hook(
                lambda *_: None if torch.compiler.is_compiling() else self._head_done()
            )
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                mark = self._gradient_marker(name)
                yield parameter.register_post_accumulate_grad_hook(mark)
        yield register_optimizer_step_pre_hook(
            lambda *_: self._tracker.set_phase(TracePhase.OPTIMIZER)
        )
        yield register_optimizer_step_post_hook(
            lambda optimizer, *_: self._optimizer_done(optimizer)
        )

    def _root_called(self) -> None:
        tracker = self._tracker
        if torch._C._current_graph_task_id() != -1:
            return
        if tracker.phase in (TracePhase.ZERO_GRAD, TracePhase.OPTIMIZER):
            tracker.step += 1
            tracker.micro_step = 0
        elif tracker.phase is TracePhase.BACKWARD:
            tracker.micro_step += 1
        tracker.set_phase(TracePhase.FORWARD)

    def _head_done(self) -> None:
        if self._tracker.phase is TracePhase.FORWARD:
            self._tracker.set_phase(TracePhase.LOSS)

    def _gradient_marker(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self._tracker.mark(parameter.grad, StorageRole.GRADIENTS, name)

    def _optimizer_done(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            owner = self._owner(parameter)
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._tracker.mark(value, StorageRole.OPTIMIZER_STATES, f"{owner}.{key}")
        self._tracker.set_phase(TracePhase.ZERO_GRAD)

    def _owner(self, parameter: object) -> str:
        """The parameter's name; an optimizer may keep states under names of its own."""
        if isinstance(parameter, torch.Tensor):
            return self._names.get(id(parameter), "?")
        return str(parameter)

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(
            parameters: Any, *args: Any, foreach: bool | None = None, **kwargs: Any
        ) -> Any:
            self._tracker.set_phase(TracePhase.CLIP)
            return clip(parameters, *args, foreach=foreach, **kwargs)

        return clip_grad_norm_


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits, where the model says which."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
