"""The precision of a training whose options say none: its trainer keeps the type of the
checkpoint."""

from __future__ import annotations

from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import Precision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.config.train_config import TrainConfig


def as_loaded(
    stored_type: str, config: TrainConfig, options: Mapping[str, object], notes: list[str]
) -> TrainConfig:
    """The training with fp32 parameters where the checkpoint has them and nothing else is said.
    Of quantized weights nothing is left in the checkpoint's type but what is fp32 in training
    anyway."""
    if (
        stored_type != "fp32"
        or {"precision", "arch"} & options.keys()  # numbers have no checkpoint
        or config.quantization is not None
        or config.precision is not Precision.BF16_AUTOCAST
        or not find_stack(config.stack).loop.keeps_stored_type
    ):
        return config
    notes.append(
        "--precision bf16-amp: the checkpoint is in fp32, which transformers 5 keeps"
        " (--precision bf16-autocast for weights in bf16)"
    )
    return config.replace(precision=Precision.BF16_AMP)
