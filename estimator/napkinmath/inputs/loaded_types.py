"""The precision of a training whose options say none: its trainer keeps the type of the
checkpoint."""

from __future__ import annotations

from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import Precision
from napkinmath.inputs.option_table.training_step import BF16_CHECKPOINT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.config.train_config import TrainConfig


def as_loaded(stored_type: str, config: TrainConfig, options: Mapping[str, object]) -> TrainConfig:
    """The training with fp32 parameters where the checkpoint has them and nothing else is said.
    Of quantized weights nothing is left in the checkpoint's type but what is fp32 in training
    anyway."""
    if (
        stored_type != "fp32"
        or "arch" in options  # numbers have no checkpoint
        or options.get("precision", BF16_CHECKPOINT) != BF16_CHECKPOINT
        or config.quantization is not None
        or config.precision is not Precision.BF16_AUTOCAST
        or not find_stack(config.stack).loop.keeps_stored_type
    ):
        return config
    return config.replace(precision=Precision.BF16_AMP)
