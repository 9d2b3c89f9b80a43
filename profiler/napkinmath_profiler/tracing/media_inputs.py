"""The tensors that a processor adds to a text for its images, on meta; those of integers have
values. What they are like is the arithmetic of napkinmath.ir.pictures, as in an estimate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from napkinmath.base.errors import NapkinError
from napkinmath.config.train_config import Batch
from napkinmath.ir.pictures import (
    AnySize,
    AnySizeFromFactor,
    AnySizeOfFrames,
    AnySizeUnmarked,
    Budget,
    Fitted,
    FittedByPatch,
    ImagePatches,
    MergedBudget,
    NeverEnlarged,
    Pictures,
)
from napkinmath.ir.tiled_pictures import (
    BestFit,
    NaflexTiles,
    Padded,
    Pinpoints,
    ScaledPinpoints,
    SplitTiles,
)
from napkinmath.models.families import read_config
from torch import nn

from napkinmath_profiler.tracing.real_values import (
    give_values,
    on_meta,
    without_zeros,
)
from napkinmath_profiler.tracing.trace_errors import TraceError


def pictures_of(config: Any) -> Pictures:
    """What the processor of a model makes of an image; TraceError for a model whose processor is
    not known."""
    values = config.to_dict()
    if isinstance(text := values.get("text_config"), dict):
        text.pop("per_layer_config", None)  # its numbers are of layers that a trace leaves out
    try:
        found = read_config(values).pictures
    except NapkinError as reason:
        raise TraceError(
            f"how many tokens an image of model_type {config.model_type} has is not known"
            f" ({reason}); leave out --image to trace the text"
        ) from reason
    if found is None:
        raise TraceError(f"{config.model_type} reads no images; leave out --image and --images")
    return found


def with_images(
    texts: dict[str, torch.Tensor],
    ids: torch.Tensor,
    model: nn.Module,
    config: Any,
    batch: Batch,
    *,
    autocast: bool = False,
) -> dict[str, torch.Tensor]:
    """`texts` and the images of every sequence, whose places in `ids` (sequences, tokens) hold the
    image's token."""
    pictures = pictures_of(config)
    picture = pictures.of(batch)
    refuse_too_many(picture, batch, ids.shape[1])
    sequences, vision = len(ids), config.vision_config

    dtype = torch.float32
    if isinstance(
        pictures, BestFit
    ):  # Llama4ImageProcessor rescales in it; the model casts nothing
        dtype = torch.bfloat16
    elif isinstance(pictures, NeverEnlarged) and not autocast:
        dtype = _type_of_patches(model)  # Kimi's model casts nothing, so that callers have to

    def pixels(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    made = _MAKERS.get(type(pictures), _tiles)(
        pictures, picture, batch, (sequences, channels), pixels
    )
    if (frames := getattr(vision, "temporal_patch_size", 1)) > 1:  # the model's, no processor's
        rows, values = made["pixel_values"].shape
        made["pixel_values"] = pixels(rows, values * frames)
    if isinstance(pictures, Padded):
        made["cross_attention_mask"] = _ones(*ids.shape, batch.images, picture.tiles)
    if isinstance(pictures, Budget):
        _say_which_are_real(model, picture)
    return {**texts, **_places(ids, picture, model, config, batch.images), **made}


def _type_of_patches(model: nn.Module) -> torch.dtype:
    """Of the weights of the convolution that cuts an image into patches."""
    return next(m.weight.dtype for m in model.modules() if isinstance(m, nn.Conv2d))


def refuse_too_many(picture: ImagePatches, batch: Batch, length: int) -> None:
    """Raises TraceError where the images of a sequence take more tokens than it has."""
    if batch.images * picture.places > length:
        raise TraceError(
            f"{batch.images} images take {batch.images * picture.places:,} tokens, more than the"
            f" {length:,} of a sequence; give a larger --ctx"
        )


def _places(
    ids: torch.Tensor, picture: ImagePatches, model: nn.Module, config: Any, images: int
) -> dict[str, torch.Tensor]:
    """Token ids with the image's token in its places, and the types of tokens where the forward
    takes them."""
    ids = ids.clone()
    token = next(
        getattr(config, name)
        for name in ("image_token_id", "image_token_index")
        if getattr(config, name, None) is not None
    )
    types = torch.zeros_like(ids)
    for index in range(images):
        first = index * picture.places + min(picture.marks, 1)
        types[:, first : first + picture.tokens] = 1
    ids[types == 1] = token
    takes = inspect.signature(model.forward).parameters
    own = next((m for m in model.modules() if type(m).__name__ == type(model).__name__), model)
    takes = {**takes, **inspect.signature(type(own).forward).parameters}
    found = {"input_ids": on_meta(ids)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes:
            found[name] = on_meta(types)
    return found


def _say_which_are_real(model: nn.Module, picture: ImagePatches) -> None:
    """Gemma 4's pooler finds the tokens that are no padding by floating shares, which have no
    values here: the first of each image."""

    def note(_module: nn.Module, _given: Any, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        mask = out[1]
        give_values(mask, (torch.arange(mask.shape[1]) < picture.tokens).expand(mask.shape))

    for module in model.modules():
        if type(module).__name__.endswith("VisionPooler"):
            module.register_forward_hook(note)


def _ones(*shape: int) -> torch.Tensor:
    return on_meta(torch.ones(shape, dtype=torch.long))


Pixels = Callable[..., torch.Tensor]


def _tiles(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    sequences, channels = sizes
    count = sequences * batch.images * picture.tiles
    return {"pixel_values": pixels(count, channels, pictures.side, pictures.side)}


def _patches(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    count = sizes[0] * batch.images
    grid = torch.tensor([[1, picture.rows, picture.columns]] * count)
    return {
        "pixel_values": pixels(count * picture.patches, sizes[1] * pictures.patch**2),
        "image_grid_thw": on_meta(grid),
    }


def _unmerged(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    made = _patches(pictures, picture, batch, sizes, pixels)
    return {**made, "image_merge_sizes": _ones(len(made["image_grid_thw"]))}


def _squares(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    made = _patches(pictures, picture, batch, sizes, pixels)
    side = pictures.patch
    return {**made, "pixel_values": pixels(len(made["pixel_values"]), sizes[1], side, side)}


def _fitted(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    count = sizes[0] * batch.images
    extent = [picture.rows * pictures.patch, picture.columns * pictures.patch]
    return {
        "pixel_values": pixels(count, sizes[1], *extent),
        "image_sizes": on_meta(torch.tensor([extent] * count)),
    }


def _split(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    tiles, side = batch.images * picture.tiles, pictures.side
    return {
        "pixel_values": without_zeros(pixels(sizes[0], tiles, sizes[1], side, side)),
        "pixel_attention_mask": _ones(sizes[0], tiles, side, side),
    }


def _pinpoints(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    count, side = sizes[0] * batch.images, pictures.side
    return {
        "pixel_values": pixels(count, picture.tiles, sizes[1], side, side),
        "image_sizes": on_meta(torch.tensor([pictures.size(batch)] * count)),
    }


def _scaled_pinpoints(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    made = _pinpoints(pictures, picture, batch, sizes, pixels)
    return {**made, "batch_num_images": on_meta(torch.tensor([batch.images] * sizes[0]))}


def _naflex(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    side, count = pictures.side // pictures.patch, sizes[0] * batch.images
    shapes = [[side, side]] * (picture.tiles - 1) + [[picture.rows, picture.columns]]
    real = torch.tensor([rows * columns for rows, columns in shapes * count])
    mask = (torch.arange(picture.patches) < real[:, None]).to(torch.int32)
    return {
        "pixel_values": pixels(*mask.shape, sizes[1] * pictures.patch**2),
        "pixel_attention_mask": on_meta(mask),
        "spatial_shapes": on_meta(torch.tensor(shapes * count)),
    }


def _padded(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    rows, side = (sizes[0], batch.images), pictures.side
    return {
        "pixel_values": pixels(*rows, picture.tiles, sizes[1], side, side),
        "aspect_ratio_ids": _ones(*rows),
        "aspect_ratio_mask": _ones(*rows, picture.tiles),
    }


def _budget(
    pictures: Pictures, picture: ImagePatches, batch: Batch, sizes: tuple[int, int], pixels: Pixels
) -> dict[str, torch.Tensor]:
    count, held = sizes[0] * batch.images, picture.rows * picture.columns
    places = torch.full((picture.patches, 2), -1)
    places[:held] = torch.tensor(
        [(x, y) for y in range(picture.rows) for x in range(picture.columns)]
    )
    side = pictures.patch * (pictures.pooled if isinstance(pictures, MergedBudget) else 1)
    return {
        "pixel_values": pixels(count, picture.patches, sizes[1] * side**2),
        "image_position_ids": on_meta(places.expand(count, -1, -1).contiguous()),
    }


_MAKERS: dict[type[Pictures], Callable[..., dict[str, torch.Tensor]]] = {
    AnySize: _patches,
    AnySizeFromFactor: _squares,
    NeverEnlarged: _squares,
    AnySizeOfFrames: _patches,
    AnySizeUnmarked: _unmerged,
    Budget: _budget,
    MergedBudget: _budget,
    Fitted: _fitted,
    FittedByPatch: _fitted,
    SplitTiles: _split,
    Pinpoints: _pinpoints,
    ScaledPinpoints: _scaled_pinpoints,
    Padded: _padded,
    NaflexTiles: _naflex,
}
