"""Words that the code of a room asks input for, found in the code itself, so that new ones are tried
too."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from random import Random
from typing import Any

import napkinmath

from fuzz_doors.draw import NUMBERS, scalar

_ROOT = Path(napkinmath.__file__).parent


@functools.cache
def words(*folders: str) -> tuple[str, ...]:
    """Every text of the code in these folders that could be a key or a value."""
    found: set[str] = set()
    for folder in folders:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            found.update(
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )
    return tuple(sorted(word for word in found if word.replace("-", "_").isidentifier()))


def with_known_keys(rng: Random, content: Any, *folders: str) -> Any:
    """A mapping with up to four more of the keys that the code of these folders knows."""
    known = words(*folders)
    if not isinstance(content, dict):
        return content
    more = {rng.choice(known): _value(rng, known) for _ in range(rng.choice((1, 2, 4)))}
    return {**content, **more}


def _value(rng: Random, known: tuple[str, ...]) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice((True, False))
    if kind < 0.7:
        return rng.choice((*NUMBERS, float(rng.choice(NUMBERS))))
    return rng.choice(known) if kind < 0.9 else scalar(rng)
