"""The pre-flight check in a loop that Accelerate prepared."""

from __future__ import annotations

from typing import Any

import torch
from napkinmath.config.train_config import TrainConfig

from napkinmath_profiler.preflight.check import Preflight, preflight

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def preflight_accelerated(
    accelerator: Any, model: Any, optimizer: Any = None, batch: Any = None, **options: Any
) -> Preflight:
    """``preflight`` of what ``accelerator.prepare`` returned, with its mixed precision and gradient
    accumulation."""
    base = options.pop("train_config", None) or TrainConfig(stack="hf-bare")
    config = base.replace(gradient_accumulation_steps=accelerator.gradient_accumulation_steps)
    return preflight(
        model,
        optimizer,
        batch,
        autocast_dtype=AUTOCAST.get(accelerator.mixed_precision),
        train_config=config,
        **options,
    )
