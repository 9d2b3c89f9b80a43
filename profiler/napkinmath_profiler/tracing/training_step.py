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
TEMPERATURE = 20.0  # any number scales alike


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
    columns: int = 1
    """Texts of a sample that a contrastive loss embeds; 1 is any other loss."""
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
    return outputs["loss"] if "loss" in outputs else features_of(outputs).mean()


def features_of(outputs: Any) -> torch.Tensor:
    """What a model without a head returns for a loss of others."""
    pooled = outputs.get("pooler_output")
    return outputs["last_hidden_state"] if pooled is None else pooled


def mean_of_tokens(states: torch.Tensor) -> torch.Tensor:
    """An embedding of each text, none of which is padded (sentence-transformers 6.2
    sentence_transformer/modules/pooling.py _forward_padded)."""
    mask = torch.ones(states.shape[:-1], dtype=torch.int64, device=states.device)
    weights = mask.unsqueeze(-1).to(states.dtype)
    wide = torch.float32 if states.dtype in (torch.float16, torch.bfloat16) else states.dtype
    total = (states * weights).sum(dim=1, dtype=wide)
    count = torch.clamp(weights.sum(dim=1, dtype=wide), min=1e-9)
    return (total / count).to(states.dtype)


def in_batch_negatives(anchors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Each anchor's positive against all other texts of the batch (sentence-transformers 6.2
    sentence_transformer/losses/multiple_negatives_ranking.py compute_loss_from_embeddings)."""
    candidates = torch.cat([others])
    rows = torch.arange(len(anchors), device=anchors.device)
    one, other = (nn.functional.normalize(x, dim=-1) for x in (anchors, candidates))
    scores = torch.mm(one, other.transpose(0, 1)) * TEMPERATURE
    positive = scores[rows, rows]
    normalizer = torch.logsumexp(torch.cat([scores], dim=1), dim=1)
    return -(positive - normalizer).mean()


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
        if self._options.columns > 1:
            loss, outputs = self._contrastive(forward), None
        else:
            outputs = forward(**self._inputs)
            loss = loss_of(outputs)
        if not self._options.keep_outputs:
            del outputs
        if self._options.gradient_accumulation_steps > 1:
            loss = loss / self._options.gradient_accumulation_steps
        self.enter(TracePhase.BACKWARD)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _contrastive(self, forward: Callable[..., Any]) -> torch.Tensor:
        """The loss of all columns under one autocast: the anchors go forward, then all other texts
        (sentence-transformers 6.2 base/losses/merged_forward.py embed_columns). The trainer's
        features hold their states."""
        dtype, kind = self._options.autocast_dtype, self._options.device_type
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            anchors = forward(**self._inputs)["last_hidden_state"]
            of_anchors = mean_of_tokens(anchors)
            others = range(self._options.columns - 1)
            given = {k: torch.cat([x for _ in others]) for k, x in self._inputs.items()}
            candidates = forward(**given)["last_hidden_state"]
            return in_batch_negatives(of_anchors, mean_of_tokens(candidates))

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
