"""Towers of joint models as data: a file each in `catalog/towers/`, learned from the class that
transformers has (tracing/learning/towers.py of the profiler writes them)."""

from __future__ import annotations

import os

from napkinmath.catalog.learned_forms import read_forms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SHIPPED = os.path.join(os.path.dirname(__file__), "towers")
_SUFFIX = ".json"


def types_with_towers() -> list[str]:
    """Model types whose towers ship, in alphabetical order."""
    names = sorted(os.listdir(SHIPPED)) if os.path.isdir(SHIPPED) else []
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


def has_towers(model_type: object) -> bool:
    """Whether the towers of this joint model ship."""
    name = str(model_type)
    plain = bool(name) and os.sep not in name and not name.startswith(".")
    return plain and os.path.isfile(os.path.join(SHIPPED, name + _SUFFIX))


def towers_of(model_type: str) -> list[Mapping[str, Any]]:
    """The towers of a joint model, a form for each set of switches."""
    return read_forms(os.path.join(SHIPPED, model_type + _SUFFIX))
