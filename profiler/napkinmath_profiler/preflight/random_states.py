"""Random states put back: a dataset's rows may draw from them when they are looked at."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def random_states_kept() -> Generator[None]:
    """Python's, NumPy's (where it is loaded) and torch's generators of the CPU are afterwards what
    they were."""
    numpy = sys.modules.get("numpy")
    own, tensors = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(own)
        torch.set_rng_state(tensors)
        if numpy is not None:
            numpy.random.set_state(arrays)
