"""The pre-flight check inside Transformers' Trainer and TRL's trainers, which are its
subclasses."""

from __future__ import annotations

import logging
from typing import Any

import torch
from napkinmath.base.errors import DoesNotFit, NapkinError
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import TrainConfig
from napkinmath.config.workload_config import Workload
from transformers import TrainerCallback

from napkinmath_profiler.preflight.batch_shape import BatchShape, longest_of
from napkinmath_profiler.preflight.check import Preflight, preflight
from napkinmath_profiler.preflight.python_words import Caller
from napkinmath_profiler.preflight.random_states import random_states_kept
from napkinmath_profiler.preflight.trl_trainers import (
    ROLLOUTS,
    ROWS_A_SAMPLE,
    loss_of,
    rollout_shape,
    workload_of,
)
from napkinmath_profiler.tracing.trace_errors import TraceError

logger = logging.getLogger("napkinmath")


class PreflightCallback(TrainerCallback):
    """Checks when training begins, before the first step: logs what it finds, raises DoesNotFit
    where nothing could fit.

    ``hardware``: a GPU by name instead of the current device; ``raises`` False only logs. An object
    that cannot be read is a warning, never the end of a training.
    """

    def __init__(self, *, hardware: str | Hardware | None = None, raises: bool = True) -> None:
        self.hardware, self.raises = hardware, raises
        self.found: Preflight | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Called by the Trainer with its model, optimizer and data loader."""
        try:
            with random_states_kept():
                self.found = self._checked(args, objects)
            if args.process_index == 0:
                logger.warning("%s", str(self.found))
        except DoesNotFit:
            raise
        except Exception as unread:
            logger.warning(
                "pre-flight check left out: %s%s",
                "" if isinstance(unread, NapkinError) else f"{type(unread).__name__}: ",
                unread,
            )

    def _checked(self, args: Any, objects: dict[str, Any]) -> Preflight:
        return preflight(
            objects["model"],
            objects.get("optimizer"),
            _shape(args, objects.get("train_dataloader"), objects.get("processing_class")),
            hardware=self.hardware,
            autocast_dtype=autocast_of(args),
            train_config=config_of(args),
            training=True,  # the Trainer says model.train() in every step
            requested_checkpointing=bool(getattr(args, "gradient_checkpointing", False)) or None,
            raises=self.raises,
            caller=Caller.TRAINER,
        )


def autocast_of(args: Any) -> torch.dtype | None:
    """The autocast region that TrainingArguments ask for."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def config_of(args: Any) -> TrainConfig:
    """What TrainingArguments (or SFTConfig, DPOConfig, ...) say that no live object does."""
    return TrainConfig(
        stack="hf",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        clip_gradients=bool(args.max_grad_norm),
        compile=bool(args.torch_compile),
        loss=loss_of(args),
        workload=(
            workload_of(args) if args.world_size == 1 else Workload()
        ),  # on several GPUs the plain step is priced
    )


def _shape(args: Any, loader: Any, tokenizer: Any) -> BatchShape:
    dataset = getattr(loader, "dataset", None)
    if type(args).__name__ in ROLLOUTS:
        return rollout_shape(args, dataset, tokenizer)
    rows = args.per_device_train_batch_size * ROWS_A_SAMPLE.get(type(args).__name__, 1)
    limit = getattr(args, "max_length", None) or 0
    if getattr(args, "packing", False) and limit:
        return BatchShape(rows, limit)
    try:
        return longest_of(dataset, rows, at_most=limit)
    except TraceError:
        if limit:
            return BatchShape(rows, limit)
        raise
