"""Tracing tests run on one thread, leave the libraries' chatter out, and run without bitsandbytes
but for what quantizes."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU's machine may have everything but bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        for item in items:
            if any(word in item.name for word in ("qlora", "quantized", "QLORA")):
                item.add_marker(pytest.mark.skip(reason="needs bitsandbytes"))


@pytest.fixture(autouse=True)
def _however_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is kept, however much other processes make it scatter."""
    from napkinmath_profiler.calibration import timing

    monkeypatch.setattr(timing, "MOST_SPREAD", math.inf)


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True, scope="session")
def _quick_collections() -> Generator[None]:
    """A run within a test does not thaw what the tests before it froze."""
    from napkinmath_profiler.measuring.garbage import quick_collections

    with quick_collections():
        yield
