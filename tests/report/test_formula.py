"""Simplified formulas mean exactly what the originals mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from napkinmath.base.expr import (
    Bindings,
    Expr,
    Size,
    ceil_div,
    maximum,
    minimum,
    render,
    round_up_to,
    symbol,
)
from napkinmath.report.formula import simplify

b, s, h, f = (symbol(name) for name in ("b", "s", "h", "f"))
LEAVES = st.one_of(st.sampled_from((b, s, h, f)), st.integers(0, 64))


def _grow(inner: st.SearchStrategy[Size]) -> st.SearchStrategy[Size]:
    pairs = st.tuples(inner, inner)
    divided = st.tuples(inner, st.integers(1, 64))
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] - p[1]),
        pairs.map(lambda p: p[0] * p[1]),
        divided.map(lambda p: ceil_div(*p)),
        divided.map(lambda p: p[0] // p[1]),
        pairs.map(lambda p: minimum(*p)),
        pairs.map(lambda p: maximum(*p)),
        divided.map(lambda p: round_up_to(*p)),
    )


@given(st.recursive(LEAVES, _grow, max_leaves=14), st.tuples(*[st.integers(1, 9999)] * 4))
def test_a_simplified_formula_has_the_same_value(size: Size, values: tuple[int, ...]) -> None:
    bind = Bindings(dict(zip("bshf", values, strict=True)))
    assert bind(simplify(size)) == bind(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (ceil_div(b * s * h * 32, 8) + ceil_div(b * s * h * 32, 8), "8·b·s·h"),
        (ceil_div(f * h * 4, 8), "⌈f·h/2⌉"),
        (2 * (3 * b * s + 5 * s * b), "16·b·s"),
        (h * 16 - 16 * h, "0"),
        (ceil_div(16 * h, 256) * 4, "4·⌈h/16⌉"),
        (b * (s + h), "b·(s + h)"),
        (7, "7"),
    ],
)
def test_like_terms_are_collected_and_divisors_cancelled(size: Size, text: str) -> None:
    assert render(simplify(size)) == text


def test_nothing_to_simplify_leaves_the_formula_as_it_is() -> None:
    size = b * s * h
    assert isinstance(size, Expr)
    assert render(simplify(size)) == render(size)


def test_a_sum_of_thousands_of_experts_is_simplified() -> None:
    """Deeper than the interpreter recurses: DeepSeek V3's units as FSDP gathers them."""
    total: Size = 0
    for _ in range(5000):
        total = total + h * f - s
    assert render(simplify(total)) == "5000·h·f - 5000·s"
