"""Expressions deeper than Python recurses: bytes of a mixture's experts add up a thousand terms."""

from __future__ import annotations

import sys

from napkinmath import estimate
from napkinmath.base.expr import Bindings, symbol
from napkinmath.config.train_config import AdapterConfig


def test_sums_of_any_length_are_evaluated() -> None:
    total = symbol("s") * 2
    for _ in range(sys.getrecursionlimit() * 3):
        total = total + symbol("s")
    assert Bindings({"s": 7})(total * 2) == 2 * 7 * (2 + sys.getrecursionlimit() * 3)


def test_adapters_on_every_expert_are_priced() -> None:
    found = estimate(
        "deepseek-v2-lite",
        stack="hf-4.45",
        sequence_length=256,
        adapter=AdapterConfig(rank=8),
        hardware="A100",
    )
    assert found.time is not None and found.time.seconds > 0
