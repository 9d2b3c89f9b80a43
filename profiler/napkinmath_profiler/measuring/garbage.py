"""Garbage collections that look at what a measurement made, not at all of the libraries' objects."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_depth = 0


@contextmanager
def quick_collections() -> Generator[None]:
    """Every run is followed by a garbage collection, which would look through all of the libraries'
    objects each time (0.3 s).

    A collection stays quick until the outermost of these blocks ends: a run within a series of runs
    does not thaw what the series froze.
    """
    global _depth
    if not _depth:
        gc.collect()
        gc.freeze()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            gc.unfreeze()
