"""Models of images alone: how large a picture is where nothing says so, and sizes of learned forms
that follow from its patches."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.models.layers.vision import ImageEntrance

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.ir.model_spec import ModelSpec

SIDE = 224
"""Pixels of a side where a config has no image_size (ResNet, RegNet): what their processors crop to
(transformers 5.23 ConvNextImageProcessor, BitImageProcessor)."""
VISION = "vision_config."
"""Begins the name of a field of a vision config inside another."""
STRIDE = 32
"""By what the stages of a model divide an image's side."""
REGISTERS = "num_register_tokens"
DERIVED = ("n", "q", "g", "table")
"""Symbols that follow from an image's side i and a patch's p: tokens of an image, its patches, those
of a side, and places of one patch as another sees it (BeitRelativePositionBias)."""


def derived_sizes(bound: Mapping[str, int], extra: int | None) -> dict[str, int]:
    """The values of DERIVED; `extra` tokens stand beside those of the patches and registers, None
    where tokens are no patches."""
    if not {"i", "p"} <= set(bound):
        return {}
    count = bound["i"] // bound["p"]
    found = {"q": count**2, "g": count, "table": (2 * count - 1) ** 2}
    return found if extra is None else {"n": count**2 + extra + bound.get(REGISTERS, 0), **found}


def side_of(spec: ModelSpec) -> tuple[int, int]:
    """(height, width) of the images that a model is given; zeros where it does not say."""
    first = spec.stages[0].part
    if isinstance(first, ImageEntrance):
        return first.image
    side = dict(spec.symbols).get("i", 0)
    return side, side


def tokens_of(spec: ModelSpec) -> int:
    """Tokens that an image becomes; 0 where it is no sequence."""
    first = spec.stages[0].part
    return first.length if isinstance(first, ImageEntrance) else dict(spec.symbols).get("n", 0)


def resized(spec: ModelSpec, width: int, height: int) -> ModelSpec:
    """The model as it is built for images of another size; raises InputError where it is not known
    for that size."""
    first, *rest = spec.stages
    if isinstance(first.part, ImageEntrance):
        part = first.part.replace(image=(height, width))
        return spec.replace(stages=(first.replace(part=part), *rest))
    found = dict(spec.symbols)
    asked = f"--image {width}x{height}"
    if "i" not in found:
        raise InputError(
            f"{asked}: {spec.name} is known with images of its own size alone; leave it out, or use"
            " `estimate trace`"
        )
    if width != height:
        raise InputError(f"{asked}: {spec.name} is priced for square images; use {width}x{width}")
    if "n" not in found and width % STRIDE:
        near = max(round(width / STRIDE), 1) * STRIDE
        raise InputError(
            f"{asked}: {spec.name} halves its images {STRIDE.bit_length() - 1} times; use"
            f" {near}x{near}"
        )
    beside = {name: value for name, value in found.items() if name not in DERIVED}
    extra = None
    if "n" in found:
        extra = found["n"] - found["q"] - found.get(REGISTERS, 0)
    beside["i"] = width
    return spec.replace(symbols=tuple((beside | derived_sizes(beside, extra)).items()))
