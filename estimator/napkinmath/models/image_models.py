"""Models of images alone: how large a picture is where nothing says so, and sizes of learned forms
that follow from its patches."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SIDE = 224
"""Pixels of a side where a config has no image_size (ResNet, RegNet): what their processors crop to
(transformers 5.23 ConvNextImageProcessor, BitImageProcessor)."""
VISION = "vision_config."
"""Begins the name of a field of a vision config inside another."""
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
