"""Formulas made shorter for a reader by exact identities: like terms collected, a divisor cancelled
against a factor.

A simplified expression evaluates to the same integer under every binding of its symbols
(tests/report/test_formula.py).
"""

from __future__ import annotations

from napkinmath.base.expr import Expr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size

    Terms = dict[
        tuple["Size", ...], int
    ]  # factors of each term -> its whole-number coefficient, in order of appearance


def simplify(size: Size) -> Size:
    """The same size with fewer signs: ⌈b·s·h·32/8⌉ + ⌈b·s·h·32/8⌉ becomes 8·b·s·h."""
    return _assemble(_terms(size))


def _terms(size: Size) -> Terms:
    if not isinstance(size, Expr):
        return {(): size} if size else {}
    op, args = size.op, size.args
    if op in ("+", "-"):
        return _sum(size)
    if op == "*":
        return _product(_terms(args[0]), _terms(args[1]))
    if op in ("ceil/", "//") and isinstance(args[1], int):
        return _quotient(op, _terms(args[0]), args[1])
    if op in ("min", "max", "ceil/", "//"):
        return {(Expr(op, simplify(args[0]), simplify(args[1])),): 1}
    if op == "up":
        return {(Expr(op, simplify(args[0]), args[1]),): 1}
    return {(size,): 1}


def _sum(size: Size) -> Terms:
    """The terms of a sum. Its summands are gone through in a loop: what thousands of experts
    gather is nested deeper than the interpreter's stack."""
    summands: list[tuple[str, Size]] = []
    while isinstance(size, Expr) and size.op in ("+", "-"):
        summands.append((size.op, size.args[1]))
        size = size.args[0]
    total = dict(_terms(size))
    for op, summand in reversed(summands):
        for factors, coefficient in _terms(summand).items():
            key = _same(total, factors)
            changed = total.get(key, 0) + (coefficient if op == "+" else -coefficient)
            total[key] = changed
            if not changed:
                del total[key]
    return total


def _same(terms: Terms, factors: tuple[Size, ...]) -> tuple[Size, ...]:
    """The key under which a product with these factors, in any order, is listed already."""
    if factors in terms:
        return factors
    wanted = sorted(map(id, factors))
    return next(
        (
            known
            for known in terms
            if len(known) == len(factors) and sorted(map(id, known)) == wanted
        ),
        factors,
    )


def _product(left: Terms, right: Terms) -> Terms:
    if len(left) > 1 and len(right) == 1 and () in right:  # a sum times a number
        return {factors: coefficient * right[()] for factors, coefficient in left.items()}
    if len(right) > 1 and len(left) == 1 and () in left:
        return {factors: coefficient * left[()] for factors, coefficient in right.items()}
    coefficient, factors = 1, list["Size"]()
    for terms in (left, right):
        if not terms:
            return {}
        if len(terms) == 1:
            ((own, number),) = terms.items()
            coefficient *= number
            factors += own
        else:
            factors.append(_assemble(terms))
    return {tuple(factors): coefficient}


def _quotient(op: str, terms: Terms, divisor: int) -> Terms:
    """Whole factors of the divisor cancelled: ⌈g·x / g·y⌉ = ⌈x/y⌉, and the same for the floor."""
    common = divisor
    for coefficient in terms.values():
        common = _gcd(common, abs(coefficient))
    reduced = {factors: coefficient // common for factors, coefficient in terms.items()}
    if common == divisor:
        return reduced
    return {(Expr(op, _assemble(reduced), divisor // common),): 1}


def _gcd(x: int, y: int) -> int:
    while y:
        x, y = y, x % y
    return x


def _assemble(terms: Terms) -> Size:
    total: Size = 0
    for factors, coefficient in terms.items():
        product: Size = abs(coefficient)
        for factor in factors:
            product = product * factor
        total = (
            product
            if total == 0 and coefficient > 0
            else total + product
            if coefficient > 0
            else total - product
        )
    return total
