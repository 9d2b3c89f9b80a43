"""Sizes that make a class run otherwise where they are equal: a projection that only a narrower
embedding needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from napkinmath_profiler.tracing.learning.config_fields import FoundFields, Trial, same_form

WIDTH = 16
"""Sizes below are counts, which no class compares with a width, as heads are."""


def unequal_pairs(
    config: Mapping[str, Any], found: FoundFields, base: Any, trial: Trial
) -> list[list[str]]:
    """Pairs of fields of which the form holds only while they differ."""
    sizes = {
        name: moves.base
        for name, moves in found.symbols.items()
        if moves.base >= WIDTH and not name.endswith("heads")
    }
    pairs: list[list[str]] = []
    for one, other in itertools.combinations(sizes, 2):
        if sizes[one] == sizes[other]:
            continue  # each was moved away from the other
        for name, value in ((one, sizes[other]), (other, sizes[one])):
            try:
                made = trial({**config, **found.changes(config, {name: value})})
            except Exception:  # whatever a class raises of values that do not go together
                continue
            if not same_form(made, base):
                pairs.append([one, other])
            break
    return pairs
