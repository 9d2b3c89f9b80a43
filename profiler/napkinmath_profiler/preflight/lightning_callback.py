"""The pre-flight check as a callback of PyTorch Lightning."""

from __future__ import annotations

import logging
from typing import Any

import torch
from napkinmath.base.errors import DoesNotFit
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import TrainConfig
from torch import nn

from napkinmath_profiler.preflight.check import Preflight, preflight
from napkinmath_profiler.preflight.python_words import Caller
from napkinmath_profiler.tracing.trace_errors import TraceError

try:
    from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found]
except ImportError:
    from pytorch_lightning.callbacks import Callback  # type: ignore[no-redef]

logger = logging.getLogger("napkinmath")
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class PreflightLightning(Callback):  # type: ignore[misc, valid-type]
    """Checks before the first step; the transformers model is the module itself or the first
    attribute of it that is one.

    ``batch``: a batch or (batch_size, sequence_length); without one the first batch of the loader
    is looked at.
    """

    def __init__(
        self, batch: Any = None, *, hardware: str | Hardware | None = None, raises: bool = True
    ) -> None:
        self.batch, self.hardware, self.raises = batch, hardware, raises
        self.found: Preflight | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_index: int) -> None:
        """Lightning has made loaders and optimizers when the first batch arrives."""
        if self.found is not None or batch_index:
            return
        try:
            self.found = preflight(
                _language_model(module),
                trainer.optimizers[0] if trainer.optimizers else None,
                self.batch if self.batch is not None else batch,
                hardware=self.hardware,
                autocast_dtype=AUTOCAST.get(trainer.precision),
                train_config=TrainConfig(
                    stack="hf-bare",
                    gradient_accumulation_steps=trainer.accumulate_grad_batches,
                    clip_gradients=bool(trainer.gradient_clip_val),
                ),
                raises=self.raises,
                caller=Caller.LIGHTNING,
            )
            logger.warning("%s", str(self.found))
        except DoesNotFit:
            raise
        except Exception as unread:  # a mistake of the check ends no training
            logger.warning("pre-flight check left out: %s: %s", type(unread).__name__, unread)


def _language_model(module: nn.Module) -> nn.Module:
    if hasattr(getattr(module, "config", None), "to_dict"):
        return module
    found = next(
        (
            child
            for child in module.children()
            if hasattr(getattr(child, "config", None), "to_dict")
        ),
        None,
    )
    if found is None:
        raise TraceError(
            f"{type(module).__name__} has no transformers model among its attributes; call"
            " preflight(model=...) yourself"
        )
    return found
