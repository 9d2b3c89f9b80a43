"""Learning a form: the learned form of a family that is written by hand equals it and the trace."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.learning.symbols import (
    Fitting,
    Recognising,
    UnknownSizeError,
    joined,
)
from napkinmath_profiler.tracing.trace_errors import TraceError

BASE = {"b": 2, "s": 320, "h": 256, "a": 8, "k": 4}
SAMPLES = [
    BASE,
    {**BASE, "b": 3},
    {**BASE, "s": 333},
    *({**BASE, name: 2 * BASE[name]} for name in ("h", "a", "k")),
    {"b": 3, "s": 320, "h": 768, "a": 16, "k": 12},
]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda b, s, h, a, k: b * s * h, "b*s*h"),
        (lambda b, s, h, a, k: 3 * h // a, "3*h//a"),
        (lambda b, s, h, a, k: h + 2 * a, "h+2*a"),
        (lambda b, s, h, a, k: (a + 2 * k) * h, "a*h+2*k*h"),
        (lambda b, s, h, a, k: -(-s // 64) * 64, "up(s,64)"),
        (lambda b, s, h, a, k: b * -(-s // 64), "b*ceil(s,64)"),
        (lambda b, s, h, a, k: 12, 12),
    ],
)
def test_sizes_become_expressions(rule: Callable[..., int], text: str | int) -> None:
    assert Fitting(SAMPLES, (64,)).fit([rule(**sample) for sample in SAMPLES]) == text


def test_an_expression_has_to_hold_where_all_sizes_move() -> None:
    numbers = [x["a"] * x["k"] for x in SAMPLES]
    with pytest.raises(TraceError, match="follows no rule"):
        Fitting(SAMPLES).fit([*numbers[:-1], numbers[-1] + 1])


def test_a_number_that_two_sizes_share_is_not_recognised() -> None:
    known = Fitting(SAMPLES)
    assert known.fit([x["h"] // x["a"] for x in SAMPLES]) == "h//a"
    assert known.fit([32] * len(SAMPLES)) == 32
    few = Recognising([BASE, {**BASE, "h": 512, "a": 16}], known)
    with pytest.raises(UnknownSizeError):
        few.fit([32, 32])


def test_a_size_without_a_rule_is_refused() -> None:
    with pytest.raises(TraceError, match="follows no rule"):
        Fitting(SAMPLES).fit([5, 7, 1, 13, 2, 3, 4])


def test_recordings_that_differ_in_more_than_sizes_are_refused() -> None:
    with pytest.raises(TraceError, match="another number"):
        joined([[Shape((2,))], [Shape((3,)), Shape((4,))]], Fitting(SAMPLES[:2]))
