"""Symbolic sizes: one declaration gives the number, the formula shown to the user, and the
vectorised sweep.

An `Expr` is an immutable, interned tree over named symbols: equal trees are one object, so that
equality is identity. Bind the symbols to ints for the estimate, to numpy integer arrays for a
sweep; `str()` gives the formula. Letters follow Korthikanti et al. (arXiv 2205.05198); see
`SYMBOLS`.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Union

    Size = Union["Expr", int]
else:
    Size = object  # named in annotations only

SYMBOLS = {
    "b": "micro-batch size",
    "s": "sequence length",
    "h": "hidden size",
    "a": "attention heads",
    "k": "key/value heads",
    "dh": "head size",
    "kg": "key/value heads of full layers",
    "dg": "head size of full layers",
    "f": "feed-forward width",
    "v": "vocabulary size",
    "L": "layers",
    "e": "experts",
    "topk": "experts a token visits",
    "r": "LoRA rank",
    "fe": "expert width",
    "fs": "shared expert width",
    "ma": "state-space heads",
    "mg": "state-space groups",
    "mi": "mixer width",
    "lk": "linear-attention key heads",
    "lv": "linear-attention value heads",
    "w": "attention window",
    "st": "target length",
    "t": "tensor-parallel degree",
    "d": "data-parallel degree",
}

_interned: dict[tuple[Any, ...], Expr] = {}
_products: dict[tuple[Size, ...], Size] = {}


class Expr:
    """A size as a tree: a symbol, or an operator over Exprs and ints. Interned, so equal trees are
    one object."""

    __slots__ = ("args", "op")
    op: str
    args: tuple[Any, ...]

    def __new__(cls, op: str, *args: Any) -> Expr:
        key = (op, *args)
        found = _interned.get(key)
        if found is None:
            found = object.__new__(cls)
            found.op, found.args = op, args
            _interned[key] = found
        return found

    def __add__(self, other: Size) -> Expr:
        return self if other == 0 else Expr("+", self, other)

    def __radd__(self, other: int) -> Expr:
        return self if other == 0 else Expr("+", other, self)

    def __sub__(self, other: Size) -> Expr:
        return self if other == 0 else Expr("-", self, other)

    def __rsub__(self, other: int) -> Expr:
        return Expr("-", other, self)

    def __mul__(self, other: Size) -> Size:
        return self if other == 1 else 0 if other == 0 else Expr("*", self, other)

    def __rmul__(self, other: int) -> Size:
        return self if other == 1 else 0 if other == 0 else Expr("*", other, self)

    def __floordiv__(self, other: Size) -> Expr:
        return self if other == 1 else Expr("//", self, other)

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr, (self.op, *self.args)


def symbol(name: str) -> Expr:
    """The symbol of that name; the same object each time."""
    return Expr("sym", name)


def ceil_div(x: Size, y: Size) -> Size:
    """x / y rounded up."""
    if isinstance(x, int) and isinstance(y, int):
        return -(-x // y)
    return x if y == 1 else Expr("ceil/", x, y)


def round_up_to(x: Size, multiple: int) -> Size:
    """x rounded up to a multiple."""
    return -(-x // multiple) * multiple if isinstance(x, int) else Expr("up", x, multiple)


def minimum(x: Size, y: Size) -> Size:
    """The smaller of two sizes, element by element in a sweep."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else Expr("min", x, y)


def maximum(x: Size, y: Size) -> Size:
    """The larger of two sizes, element by element in a sweep."""
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else Expr("max", x, y)


def power_of_two(x: Size) -> Size:
    """The least power of two that is not below x."""
    return 1 << max(x - 1, 0).bit_length() if isinstance(x, int) else Expr("2^", x, 0)


def product(axes: tuple[Size, ...]) -> Size:
    """The element count of a tensor with these axes."""
    result = _products.get(axes)
    if result is None:
        result = 1
        for axis in axes:
            result = result * axis
        _products[axes] = result
    return result


def substituted(expr: Size, values: Mapping[str, Size]) -> Size:
    """The same size with symbols replaced by other sizes."""
    if not isinstance(expr, Expr):
        return expr
    if expr.op == "sym":
        return values.get(expr.args[0], expr)
    x, y = (substituted(part, values) for part in expr.args)
    if isinstance(x, int) and isinstance(y, int):
        return Bindings({})(Expr(expr.op, x, y))
    if expr.op == "+":
        return x + y
    if expr.op == "*":
        return x * y
    return Expr(expr.op, x, y)


class Bindings:
    """Values of symbols (ints, or numpy integer arrays that broadcast together), with every
    evaluated subtree remembered."""

    __slots__ = ("_memo", "derived", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.derived: dict[
            Any, Any
        ] = {}  # what others compute from these bindings and want to remember
        self._memo: dict[Expr, Any] = {}

    def extended(self, values: Mapping[str, Any]) -> Bindings:
        """The same bindings with some symbols bound otherwise: a vision tower's own hidden size, or
        an expression in the symbols as they are."""
        return (
            Bindings({**self.values, **{name: self(value) for name, value in values.items()}})
            if values
            else self
        )

    def __call__(self, expr: Size) -> Any:
        """The value of an expression; raises KeyError naming a symbol without a value, and InputError
        where sizes divide by one that is 0."""
        if not isinstance(expr, Expr):
            return expr
        memo = self._memo
        found = memo.get(expr)
        if found is None:
            try:
                found = memo[expr] = self._evaluate(expr)
            except ZeroDivisionError:
                raise InputError(
                    f"the sizes given make {expr.args[1]} zero, by which others are divided; give"
                    " sizes that divide"
                ) from None
        return found

    def _evaluate(self, expr: Expr) -> Any:
        op, args = expr.op, expr.args
        if op == "sym":
            return self.values[args[0]]
        if op == "+" and isinstance(args[0], Expr) and args[0].op == "+":
            self._add_up(args[0])
        x, y = self(args[0]), self(args[1])
        if op == "*":
            return x * y
        if op == "+":
            return x + y
        if op == "up":
            return -(-x // y) * y
        if op == "-":
            return x - y
        if op == "//":
            return x // y
        if op == "ceil/":
            return -(-x // y)
        if op == "2^":
            return _power_of_two(x)
        return _extreme(op, x, y)

    def _add_up(self, expr: Size) -> None:
        """Remembers the partial sums of a long sum from its first term on: bytes of a thousand
        experts are deeper than Python recurses."""
        memo = self._memo
        waiting: list[Expr] = []
        while isinstance(expr, Expr) and expr.op == "+" and expr not in memo:
            waiting.append(expr)
            expr = expr.args[0]
        for part in reversed(waiting):
            memo[part] = self(part.args[0]) + self(part.args[1])


def _power_of_two(x: Any) -> Any:
    if isinstance(x, int):
        return power_of_two(x)
    import numpy as np  # only a sweep binds arrays, and then numpy is loaded already

    return 2 ** np.ceil(np.log2(np.maximum(x, 1))).astype(np.int64)


def _extreme(op: str, x: Any, y: Any) -> Any:
    if isinstance(x, int) and isinstance(y, int):
        return min(x, y) if op == "min" else max(x, y)
    import numpy as np  # only a sweep binds arrays, and then numpy is loaded already

    return np.minimum(x, y) if op == "min" else np.maximum(x, y)


_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2}


def render(expr: Size, values: Mapping[str, Any] | None = None) -> str:
    """The formula as text, with symbols, or with their values when given: 'b·s·f' or
    '4·2048·11008'."""
    return _render(expr, values, 0)


def _render(expr: Size, values: Mapping[str, Any] | None, outer: int) -> str:
    if not isinstance(expr, Expr):
        return str(expr)
    op, args = expr.op, expr.args
    if op == "sym":
        return args[0] if values is None else str(values[args[0]])
    if op in ("min", "max"):
        return f"{op}({_render(args[0], values, 0)}, {_render(args[1], values, 0)})"
    if op == "2^":
        return f"2^⌈log2({_render(args[0], values, 0)})⌉"
    if op == "up":
        return f"⌈{_render(args[0], values, 0)}⌉{args[1]}"
    if op == "ceil/":
        return f"⌈{_render(args[0], values, 2)}/{_render(args[1], values, 2)}⌉"
    level = _PRECEDENCE[op]
    sign = {"+": " + ", "-": " - ", "*": "·", "//": "/"}[op]
    text = f"{_render(args[0], values, level)}{sign}{_render(args[1], values, level + (op in ('-', '//')))}"
    return f"({text})" if level < outer else text
