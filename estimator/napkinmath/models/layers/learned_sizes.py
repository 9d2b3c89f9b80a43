"""Sizes of learned forms: their text as expressions."""

from __future__ import annotations

from napkinmath.base.expr import Expr, Size, ceil_div, round_up_to, symbol

_SIZES: dict[str, Size] = {}


def size_of(written: str | int) -> Size:
    """The expression that a learned size stands for ('2*b*s*h//a', 'up(s,64)')."""
    if isinstance(written, int):
        return written
    found = _SIZES.get(written)
    if found is None:
        found = _SIZES[written] = _parsed(written)
    return found


def _parsed(text: str) -> Size:
    total: Size = 0
    for sign, term in _terms(text):
        value = _term(term)
        total = total + value if sign == "+" else total - value
    return total


def _terms(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    sign, piece, depth = "+", "", 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter in "+-" and not depth:
            found.append((sign, piece))
            sign, piece = letter, ""
        else:
            piece += letter
    return [*found, (sign, piece)]


def _term(text: str) -> Size:
    above, *below = text.split("//")
    value: Size = 1
    for factor in above.split("*"):
        value = value * _factor(factor)
    for divisor in below:
        by = _factor(divisor)
        value = over(value, by)
    return value


def over(value: Size, by: Size) -> Size:
    """The quotient, which leaves no rest."""
    if isinstance(value, int) and isinstance(by, int):
        return value // by
    return value if by == 1 else Expr("//", value, by)


def _factor(text: str) -> Size:
    if text.isdecimal():
        return int(text)
    if text.startswith(("up(", "ceil(")):
        function, _, inner = text[:-1].partition("(")
        name, _, multiple = inner.partition(",")
        rounded = round_up_to if function == "up" else ceil_div
        return rounded(symbol(name), int(multiple))
    return symbol(text)
