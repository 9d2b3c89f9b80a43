"""The pre-flight check inside Transformers' Trainer and TRL's trainers, which are its subclasses."""

from __future__ import annotations

import logging
from typing import Any

import torch
from napkinmath.errors import NapkinError
from napkinmath.hardware import Hardware
from napkinmath.train_config import Loss, TrainConfig
from transformers import TrainerCallback

from napkinmath_profiler.preflight.batch_shape import BatchShape, longest_of
from napkinmath_profiler.preflight.check import Preflight, preflight
from napkinmath_profiler.tracing.trace_errors import TraceError

logger = logging.getLogger("napkinmath")
# Sequences of a micro-batch for each row of the dataset: DPO and reward models run the chosen and the rejected answer together.
ROWS_A_SAMPLE = {"DPOConfig": 2, "RewardConfig": 2, "ORPOConfig": 2, "CPOConfig": 2, "KTOConfig": 1}


class PreflightCallback(TrainerCallback):
    """Checks when training begins, before the first step: logs what it finds, raises DoesNotFit where nothing could fit.

    ``hardware``: a GPU by name instead of the current device; ``raises`` False only logs. An object that cannot be read is a warning,
    never the end of a training.
    """

    def __init__(self, *, hardware: str | Hardware | None = None, raises: bool = True) -> None:
        self.hardware, self.raises = hardware, raises
        self.found: Preflight | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Called by the Trainer with its model, optimizer and data loader."""
        try:
            self.found = preflight(
                objects["model"],
                objects.get("optimizer"),
                _shape(args, objects.get("train_dataloader")),
                hardware=self.hardware,
                autocast_dtype=autocast_of(args),
                train_config=config_of(args),
                requested_checkpointing=bool(getattr(args, "gradient_checkpointing", False)) or None,
                raises=self.raises,
            )
        except TraceError as unread:
            logger.warning("pre-flight check left out: %s", unread)
            return
        except NapkinError:
            raise
        if args.process_index == 0:
            logger.warning("%s", self.found)


def autocast_of(args: Any) -> torch.dtype | None:
    """The autocast region that TrainingArguments ask for."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def config_of(args: Any) -> TrainConfig:
    """What TrainingArguments (or SFTConfig, DPOConfig, ...) say that no live object does."""
    uses_tiles = hasattr(args, "loss_type") and type(args).__name__ == "SFTConfig" and _trl_never_holds_logits()
    return TrainConfig(
        stack="hf",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        clip_gradients=bool(args.max_grad_norm),
        compile=bool(args.torch_compile),
        loss=Loss.FUSED if getattr(args, "use_liger_kernel", False) else Loss.CHUNKED if uses_tiles else Loss.HF,
    )


def _trl_never_holds_logits() -> bool:
    """TRL since its SFTTrainer puts a fused head on every model (trl/trainer/utils.py add_fused_lm_head)."""
    try:
        from trl.trainer import utils
    except ImportError:
        return False
    return hasattr(utils, "add_fused_lm_head")


def _shape(args: Any, loader: Any) -> BatchShape:
    rows = args.per_device_train_batch_size * ROWS_A_SAMPLE.get(type(args).__name__, 1)
    limit = getattr(args, "max_length", None) or 0
    if getattr(args, "packing", False) and limit:
        return BatchShape(rows, limit)
    dataset = getattr(loader, "dataset", None)
    try:
        return longest_of(dataset, rows, at_most=limit)
    except TraceError:
        if limit:
            return BatchShape(rows, limit)
        raise
