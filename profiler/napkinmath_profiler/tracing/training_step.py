"""A training loop as people write it around a transformers model, for when the user gives only a
config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.base.errors import InputError
from torch import nn

from napkinmath_profiler.tracing.compiled import compiled
from napkinmath_profiler.tracing.storage_events import TracePhase

MOST_MICRO_STEPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How the loop is written: micro-steps, clipping, precision, and whether the model's outputs
    outlive the forward."""

    num_steps: int = 2
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    keep_outputs: bool = False
    autocast_dtype: torch.dtype | None = None
    convert_outputs_to_fp32: bool = False
    compile: bool = False
    device_type: str = "cuda"
    """Whose autocast and gradient scaler: CUDA's on the meta device too."""

    def __post_init__(self) -> None:
        if self.gradient_accumulation_steps > MOST_MICRO_STEPS:
            raise InputError(
                f"--grad-accum {self.gradient_accumulation_steps}: the libraries' own code runs"
                f" every micro-step here, at most {MOST_MICRO_STEPS}; those after the second are"
                " alike, so give --grad-accum 2"
            )


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss; of a model without one the mean of what it returns: the pooled first token where it
    pools, else the last hidden states."""
    if "loss" in outputs:
        return outputs["loss"]
    pooled = outputs.get("pooler_output")
    return (outputs["last_hidden_state"] if pooled is None else pooled).mean()


class TrainingLoop:
    """Forward with loss, backward, clipping, optimizer step and zero_grad, ``num_steps`` times over
    one batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        inputs: Mapping[str, Any],
        options: LoopOptions,
    ) -> None:
        self._model, self._optimizer, self._inputs, self._options = (
            model,
            optimizer,
            inputs,
            options,
        )
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._scaler: torch.amp.GradScaler | None = None

    def run(self) -> None:
        """All the steps."""
        forward = self.begin()
        for _ in range(self._options.num_steps):
            self.one_step(forward)

    def begin(self) -> Callable[..., Any]:
        """The forward to give to ``one_step``; float16 autocast comes with a gradient scaler, as in
        the Trainer."""
        if self._options.autocast_dtype == torch.float16:
            self._scaler = torch.amp.GradScaler(self._options.device_type)
        return self._forward()

    def one_step(self, forward: Callable[..., Any]) -> None:
        """The micro-steps of one optimizer step, and that step."""
        for _ in range(self._options.gradient_accumulation_steps):
            self._micro_step(forward)
        self._update()

    def enter(self, phase: TracePhase) -> None:
        """Called as a phase of the step begins, for those who measure phases."""

    def _compiled(self) -> Callable[..., Any]:
        return compiled(self._model)

    def _forward(self) -> Callable[..., Any]:
        """The model's call under autocast, its outputs made float32 as accelerate's
        ``prepare_model`` does."""
        options = self._options
        forward: Callable[..., Any] = self._compiled() if options.compile else self._model.__call__
        if options.autocast_dtype is None:
            return forward
        forward = torch.autocast(options.device_type, dtype=options.autocast_dtype)(forward)
        if options.convert_outputs_to_fp32:
            from accelerate.utils import convert_outputs_to_fp32

            forward = convert_outputs_to_fp32(forward)
        return forward

    def _micro_step(self, forward: Callable[..., Any]) -> None:
        self.enter(TracePhase.FORWARD)
        outputs = forward(**self._inputs)
        loss = loss_of(outputs)
        if not self._options.keep_outputs:
            del outputs
        if self._options.gradient_accumulation_steps > 1:
            loss = loss / self._options.gradient_accumulation_steps
        self.enter(TracePhase.BACKWARD)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _update(self) -> None:
        optimizer, scaler = self._optimizer, self._scaler
        if self._options.max_grad_norm is not None:
            self.enter(TracePhase.CLIP)
            if scaler is not None and optimizer is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._trainable, self._options.max_grad_norm)
        if optimizer is None:
            return
        self.enter(TracePhase.OPTIMIZER)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self.enter(TracePhase.ZERO_GRAD)
        optimizer.zero_grad(set_to_none=True)
