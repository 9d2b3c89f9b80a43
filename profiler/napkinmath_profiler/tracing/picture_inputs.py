"""The tensors that a model of images alone is given: pixels, or patches where its processor cuts
them; frames of videos, and spectrograms of sounds."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from napkinmath.config.train_config import Batch
from napkinmath.models.image_models import SIDE
from torch import nn

from napkinmath_profiler.tracing.real_values import on_meta
from napkinmath_profiler.tracing.trace_errors import TraceError

CLASSIFIES = "ForImageClassification"
SPECTROGRAM = "input_values"


def reads_pixels(model: nn.Module) -> bool:
    """Whether a class is given pixels and no text."""
    named = getattr(model, "main_input_name", "input_ids")
    of_bins = named == SPECTROGRAM and hasattr(model.config, "num_mel_bins")
    takes = inspect.signature(model.forward).parameters
    if of_bins or (named == "pixel_values" and "input_ids" not in takes):  # BLIP-2 reads both
        return True
    return CLASSIFIES in type(model).__name__ and "pixel_values" in takes


def pixels_of(
    model: nn.Module, config: Any, count: int, dtype: torch.dtype, media: Batch | None
) -> dict[str, Any]:
    """`count` images of the size that is asked for, else of the config's, else of SIDE pixels."""
    if getattr(model, "main_input_name", "") == SPECTROGRAM:
        bins = (count, config.max_length, config.num_mel_bins)
        return {SPECTROGRAM: torch.empty(bins, dtype=dtype, device="meta")}
    vision = getattr(config, "vision_config", None) or config
    asked = media.image_size[::-1] if media is not None and media.image_size else ()
    height, width = asked or side_of(config)
    channels = getattr(vision, "num_channels", 3)
    if "spatial_shapes" in inspect.signature(model.forward).parameters:
        return _patches(vision, count, channels, dtype, asked=bool(asked))
    frames = getattr(config, "num_frames", 0)
    shape = (count, *([frames] if frames else []), channels, height, width)
    return {"pixel_values": torch.empty(shape, dtype=dtype, device="meta")}


def sized(config: Any, media: Batch) -> Any:
    """The config of a classifier of images for those of the size that is asked for."""
    names = getattr(config, "architectures", None) or [""]
    alone = CLASSIFIES in names[0] or getattr(config, "vision_config", None) is None
    if not media.image_size or not alone:
        return config
    width, height = media.image_size
    copied = copy.deepcopy(config)
    owner = getattr(copied, "vision_config", None) or copied
    owner.image_size = height if width == height else [height, width]
    return copied


def side_of(config: Any) -> tuple[int, int]:
    """(height, width) of the images that a model was made for."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or SIDE
    return (size[0], size[1]) if isinstance(size, (tuple, list)) else (size, size)


def _patches(
    vision: Any, count: int, channels: int, dtype: torch.dtype, *, asked: bool
) -> dict[str, Any]:
    """As many patches as the model has positions, of a square image (Siglip2ImageProcessor)."""
    if asked:
        raise TraceError(
            "--image: the processor of this model makes the same number of patches of every image;"
            " leave it out"
        )
    held, side = vision.num_patches, math.isqrt(vision.num_patches)
    shape = (count, held, channels * vision.patch_size**2)
    return {
        "pixel_values": torch.empty(shape, dtype=dtype, device="meta"),
        "pixel_attention_mask": on_meta(torch.ones(count, held, dtype=torch.int32)),
        "spatial_shapes": on_meta(torch.tensor([[side, side]] * count)),
    }
