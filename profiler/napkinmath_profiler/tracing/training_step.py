"""One training loop, as people write it, run under the tracker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.storage_tracker import StorageTracker

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How the loop is written: micro-steps, clipping, and whether the model's outputs outlive the forward."""

    num_steps: int = 2
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    keep_outputs: bool = False
    autocast_dtype: torch.dtype | None = None
    convert_outputs_to_fp32: bool = False


class StepRunner:
    """Runs forward, loss, backward, clipping, optimizer step and zero_grad, telling the tracker where it is."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, tracker: StorageTracker, options: LoopOptions) -> None:
        self.model, self.optimizer, self.tracker, self.options = model, optimizer, tracker, options
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.marks: dict[str, int] = {}
        self.forward = self._wrapped_forward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: tracker.mark(p.grad, StorageRole.GRADIENTS, name))

    def run(self, inputs: dict[str, Any], head: nn.Module | None) -> None:
        """All the steps."""
        handle = head.register_forward_hook(lambda *_: self._enter_loss()) if head is not None else None
        try:
            for step in range(self.options.num_steps):
                self.tracker.step = step
                for micro_step in range(self.options.gradient_accumulation_steps):
                    self.tracker.micro_step = micro_step
                    self._forward_backward(inputs, f"{step}:{micro_step}")
                self._update()
                self.marks[f"step_end:{step}"] = len(self.tracker.events) - 1
        finally:
            if handle is not None:
                handle.remove()

    def _wrapped_forward(self) -> Callable[..., Any]:
        """The model's call under autocast, its outputs made float32 as accelerate's ``prepare_model`` does."""
        options = self.options
        if options.autocast_dtype is None:
            return self.model
        forward: Callable[..., Any] = torch.autocast("cuda", dtype=options.autocast_dtype)(self.model.__call__)
        if options.convert_outputs_to_fp32:
            from accelerate.utils import convert_outputs_to_fp32

            forward = convert_outputs_to_fp32(forward)
        return forward

    def _enter_loss(self) -> None:
        if self.tracker.phase is TracePhase.FORWARD:
            self.tracker.set_phase(TracePhase.LOSS)

    def _forward_backward(self, inputs: dict[str, Any], label: str) -> None:
        tracker = self.tracker
        tracker.set_phase(TracePhase.FORWARD)
        outputs = self.forward(**inputs)
        loss = outputs["loss"]
        if not self.options.keep_outputs:
            del outputs
        if self.options.gradient_accumulation_steps > 1:
            loss = loss / self.options.gradient_accumulation_steps
        self.marks[f"forward_end:{label}"] = len(tracker.events) - 1
        tracker.set_phase(TracePhase.BACKWARD)
        loss.backward()
        self.marks[f"backward_end:{label}"] = len(tracker.events) - 1

    def _update(self) -> None:
        tracker = self.tracker
        if self.options.max_grad_norm is not None:
            tracker.set_phase(TracePhase.CLIP)
            nn.utils.clip_grad_norm_(self.trainable, self.options.max_grad_norm, foreach=True)
        if self.optimizer is None:
            return
        tracker.set_phase(TracePhase.OPTIMIZER)
        self.optimizer.step()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tracker.mark(value, StorageRole.OPTIMIZER_STATES, f"{names.get(id(parameter), '?')}.{key}")
        tracker.set_phase(TracePhase.ZERO_GRAD)
        self.optimizer.zero_grad(set_to_none=True)
