"""What is learned of a model of images: fields of its vision config, and sizes that follow from how
many patches an image has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from napkinmath.models.image_models import DERIVED, SIDE, VISION
from napkinmath.models.tasks import CAUSAL, PICTURED, named_task
from torch import nn

from napkinmath_profiler.tracing.learning.rows import dtype_name
from napkinmath_profiler.tracing.learning.symbols import MOST_PARTS, Fitting, View
from napkinmath_profiler.tracing.meta_model import config_from, example_inputs

if TYPE_CHECKING:
    from napkinmath_profiler.tracing.learning.samples import Sizes

NAMES = {"input_ids": "input ids", "pixel_values": "pixel values", "input_values": "spectrogram"}
"""Inputs that the estimator calls otherwise."""
OF_BACKBONES = ("stage_names", "out_features", "out_indices", "pool_scales")
"""What detectors and segmenters read of it, and no classifier."""
SIDE_FIELD = "image_size"
SCALES = (SIDE_FIELD, "patch_size")
"""Fields that change how many patches there are, and with it most sizes."""
SCALES_IN_TIME = ("num_frames", "tubelet_size", "max_length", "num_mel_bins")
"""The same of videos and spectrograms."""
STRIDES = "_stride"
LARGEST_PART = 1 << 14
"""By what a size may be a part of an image's area: strides of 32, and of 64 with a head's share."""


def is_of_images(config: Mapping[str, Any]) -> bool:
    """Whether the class of a config's architecture sorts images."""
    names = config.get("architectures") or [""]
    return named_task(str(names[0]), CAUSAL) in PICTURED


def moves_in_time(config: Mapping[str, Any]) -> bool:
    """Whether what a class sorts is as long as its config says: a video or a spectrogram."""
    return any(name in config for name in SCALES_IN_TIME[1:]) and is_of_images(config)


def is_scale(name: str) -> bool:
    """Whether a field changes how many patches there are."""
    plain = name.rpartition(".")[2]
    return plain in (*SCALES, *SCALES_IN_TIME) or plain.endswith(STRIDES)


def is_no_count_of_labels(name: str) -> bool:
    """Whether a field is not how many classes there are."""
    return name != "num_labels"


def is_no_side(name: str) -> bool:
    """Whether a field is neither how many classes there are nor how large an image is."""
    return is_no_count_of_labels(name) and name.rpartition(".")[2] != SIDE_FIELD


def has_stages(config: Mapping[str, Any]) -> bool:
    """Whether lists say how wide and deep each stage of a model is."""
    return any(isinstance(x, list) and any(type(y) is int for y in x) for x in config.values())


def with_side(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the size of its images, where its class has none; its vision config's fields
    by dotted names, without its text."""
    config = {name: x for name, x in config.items() if name not in OF_BACKBONES}
    vision = config.get("vision_config")
    if isinstance(vision, dict):
        rest = {k: v for k, v in config.items() if k not in ("vision_config", "text_config")}
        config = {**rest, **{f"{VISION}{k}": v for k, v in vision.items()}}
    sides = [name for name in config if name.rpartition(".")[2] == SIDE_FIELD]
    return config if sides else {**config, SIDE_FIELD: SIDE}


def tokens_of(model: nn.Module, layers: str, run: Any) -> int:
    """Rows of hidden states that the first layer is given; 0 where they are no sequence."""
    seen: list[int] = []

    def note(_module: nn.Module, given: tuple[Any, ...]) -> None:
        shape = getattr(given[0], "shape", ()) if given else ()
        seen.append(shape[1] if len(shape) == 3 else 0)

    first = model.get_submodule(layers)[0] if layers else None  # type: ignore[index]
    if first is None:
        return 0
    hook = first.register_forward_pre_hook(note)
    try:
        run()
    finally:
        hook.remove()
    return seen[0] if seen else 0


def embedding_of(model: nn.Module, run: Any) -> dict[str, Any]:
    """What enable_input_require_grads makes of a class: the path of an input embedding that returns
    more than a tensor, which its hook does not take; or that there is none to hook."""
    found: list[str] = []

    def note(module: nn.Module, _given: Any, made: Any) -> None:
        if not isinstance(made, torch.Tensor):
            found.extend(path for path, one in model.named_modules() if one is module)

    try:
        embedding: nn.Module | None = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:  # transformers finds none
        embedding = None
    if embedding is None:
        return {"no embedding": True}
    hook = embedding.register_forward_hook(note)
    try:
        run()
    finally:
        hook.remove()
    return {"embeds a tuple": found[0]} if found else {}


def inputs_of(
    model: nn.Module, samples: Sequence[Sizes]
) -> tuple[dict[str, list[str | int]], dict[str, str]]:
    """What the class is given: axes of each input, and its type ('' is the model's)."""
    fitting = fitting_of([one.bound for one in samples], ())
    seen: list[dict[str, torch.Tensor]] = []
    for one in samples:
        config = config_from(dict(one.config))
        rows = one.place[0]
        seen.append(example_inputs(model, config, micro_batch_size=rows, sequence_length=1))
    axes = {
        name: [fitting.fit(numbers) for numbers in zip(*(x[name].shape for x in seen), strict=True)]
        for name in seen[0]
    }
    types = {
        name: "" if x.is_floating_point() else dtype_name(x.dtype) for name, x in seen[0].items()
    }
    return {NAMES.get(k, k): v for k, v in axes.items()}, {
        NAMES.get(k, k): v for k, v in types.items()
    }


def extra_tokens(tokens: int, bound: Mapping[str, int]) -> int | None:
    """Tokens beside those of the patches and registers; None where the tokens are not patches."""
    if not tokens or not {"i", "p"} <= set(bound):
        return None
    rest = tokens - (bound["i"] // bound["p"]) ** 2 - bound.get("num_register_tokens", 0)
    return rest if 0 <= rest <= 2 else None


def fitting_of(samples: Sequence[Mapping[str, int]], chunks: Sequence[int]) -> Fitting:
    """A fitting that knows sizes of whole patches and of the tokens that they are."""
    if not {"i", "p"} <= set(samples[0]):
        return Fitting(
            samples, chunks, most_parts=LARGEST_PART if "i" in samples[0] else MOST_PARTS
        )
    plain = [{k: v for k, v in one.items() if k not in DERIVED} for one in samples]
    views: list[View] = []
    names = [name for name in DERIVED if all(name in one for one in samples)]
    for name in names:
        away = {"i", "p", *DERIVED} | ({"num_register_tokens"} if name == "n" else set())
        views.append(
            [{k: v for k, v in one.items() if k == name or k not in away} for one in samples]
        )
    return Fitting(plain, chunks, views=views, most_parts=LARGEST_PART)
