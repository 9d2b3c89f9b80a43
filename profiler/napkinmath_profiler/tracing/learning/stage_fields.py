"""Models whose layers stand in stages of different widths: entries of a config's lists as fields of
their own ('hidden_sizes.0'), and where each stage's layers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath.models.image_models import VISION
from napkinmath.models.learned_stages import DEPTHS, entries
from torch import nn

from napkinmath_profiler.tracing.trace_errors import TraceError

FEW = 4
"""Layers of a stage that tell a first, an odd, an even and a last one."""
SCALES = ("image_size", "patch", "stride", "sr_ratio", "reduction", "window", "kernel", "padding")
"""Words of fields that change how many places an image has in a way that is no product."""
SIDE_FIELD = "image_size"


def are_entries(config: Mapping[str, Any]) -> bool:
    """Whether a config has the entries of its lists as fields of their own."""
    return f"{DEPTHS}.0" in config


def with_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with an entry of a list for each stage as a field; as it is where it has none."""
    depths = config.get(DEPTHS)
    return entries(config, len(depths)) if isinstance(depths, list) else dict(config)


def is_entry(name: str) -> bool:
    """Whether a field is an entry of a list."""
    return name.rpartition(".")[2].isdecimal()


def is_depth(name: str) -> bool:
    """Whether a field counts the layers of a stage."""
    return name.startswith(f"{DEPTHS}.")


def was_read(name: str, read: set[str]) -> bool:
    """Whether a class asks for a field, or for the list that it is an entry of."""
    return name in read or (is_entry(name) and name.rpartition(".")[0] in read)


def is_scale_of_stages(name: str) -> bool:
    """Whether a field changes the places of an image otherwise than its side does."""
    plain = name.removeprefix(VISION)
    return plain != SIDE_FIELD and any(word in plain for word in SCALES)


def is_scale_or_side(name: str) -> bool:
    """The same, an image's side among them."""
    return is_scale_of_stages(name) or name.removeprefix(VISION) == SIDE_FIELD


def shortened_stages(config: Mapping[str, Any], more: int) -> dict[str, Any]:
    """The config with stages of as few layers as show every kind, and `more`."""
    return {k: FEW + more if is_depth(k) else x for k, x in config.items()}


def paths_of_stages(model: nn.Module, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The path of each stage's list of layers; empty for a model without; raises TraceError where
    they cannot be known."""
    depths = [value for name, value in config.items() if is_depth(name)]
    if not depths:
        return ()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(depths):
            found = [_list_in(one, depth) for one, depth in zip(module, depths, strict=True)]
            if all(one is not None for one in found):
                return tuple(f"{path}.{i}{own}" for i, own in enumerate(found))
    raise TraceError("its stages have no lists of as many layers as its depths say")


def _list_in(stage: nn.Module, depth: int) -> str | None:
    """The path of a list of so many layers inside a stage ('' is the stage itself)."""
    for path, module in stage.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return f".{path}" if path else ""
    return None


def stages_of(paths: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """The rule of each stage's layers: the kind of its first, of odd and of even ones, and of its
    last where that is another (models/learned_stages.py)."""
    found: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        first, odd, even, last = kinds[FEW * number : FEW * (number + 1)]
        known = [first, odd, even, *([last] if last != odd else [])]
        found.append({"path": path, "count": f"{DEPTHS}.{number}", "kinds": known})
    return found
