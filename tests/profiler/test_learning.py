"""Learning a form: the learned form of a family that is written by hand equals it and the trace."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from napkinmath_profiler.tracing.learning.rows import Shape
from napkinmath_profiler.tracing.learning.symbols import Fitting, coded, joined
from napkinmath_profiler.tracing.trace_errors import TraceError

SAMPLES = [
    {"b": 2, "s": 320, "h": 256, "a": 8},
    {"b": 3, "s": 320, "h": 256, "a": 8},
    {"b": 2, "s": 333, "h": 256, "a": 8},
    {"b": 2, "s": 320, "h": 512, "a": 8},
    {"b": 2, "s": 320, "h": 256, "a": 16},
]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda b, s, h, a: b * s * h, "b*s*h"),
        (lambda b, s, h, a: 3 * h // a, "3*h//a"),
        (lambda b, s, h, a: h + 2 * a, "h+2*a"),
        (lambda b, s, h, a: -(-s // 64) * 64, "up(s,64)"),
        (lambda b, s, h, a: 12, 12),
    ],
)
def test_sizes_become_expressions(rule: object, text: str | int) -> None:
    assert Fitting(SAMPLES, (64,)).fit([rule(**sample) for sample in SAMPLES]) == text  # type: ignore[operator]


def test_a_size_without_a_rule_is_refused() -> None:
    with pytest.raises(TraceError, match="follows no rule"):
        Fitting(SAMPLES).fit([5, 7, 1, 13, 2])


def test_recordings_that_differ_in_more_than_sizes_are_refused() -> None:
    with pytest.raises(TraceError, match="another number"):
        joined([[Shape((2,))], [Shape((3,)), Shape((4,))]], Fitting(SAMPLES[:2]))


def test_symbols_are_told_apart_by_the_samples_that_move_them() -> None:
    moved = coded(("b", "s", "h", "a", "k"))
    codes = {name: tuple(name in some for some in moved) for name in ("b", "s", "h", "a", "k")}
    assert len(set(codes.values())) == 5
    assert all(any(code) for code in codes.values())
