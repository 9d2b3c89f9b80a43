"""Values of Python expressions as far as the text alone says them."""

from __future__ import annotations

import ast

from napkinmath.base.errors import shown
from napkinmath.base.record import Record
from napkinmath.inputs.scripts.python_texts import path_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LONGEST = 1 << 14
_MOST_ITEMS = 1 << 12
_DTYPES = ("bfloat16", "float16", "float32", "half", "bfloat", "float", "float64", "float8_e4m3fn")
# Answered as on the GPUs that are priced: those that lack bf16 are told by a finding.
_TRUE_CALLS = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
# transformers 4.30 to 5.23 training_args.py.
_OF_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("bf16", "fp16", "gradient_checkpointing"), False),
    **{"deepspeed": None, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}
# Methods of a list -> where what they add begins among their arguments.
_ADDED = {"append": 0, "extend": 0, "insert": 1}
_CONVERSIONS = {"int": int, "float": float, "str": str, "bool": bool, "abs": abs, "round": round}


MISSING = object()
"""What a branch that does not say a value leaves."""


class Unknown(Record):
    """A value that only a run knows."""

    source: str
    line: int
    most: int = 0
    """What it cannot exceed: 2048 of `2048 - length`; 0 where nothing says."""


class Made:
    """What a call made: a model, a trainer's arguments, an adapter's config, an object of the
    script's own."""

    def __init__(self, kind: str, name: str, line: int) -> None:
        self.kind, self.name, self.line = kind, name, line
        self.keys: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.own: set[str] = set()
        """Keys that a class of the script's own adds to a library's."""
        self.passed = False
        """Whether any call was given it."""
        self.model: Made | None = None
        """The model whose config it is."""
        self._copy: Made | None = None

    def set(self, key: str, value: object, line: int) -> None:
        """Sets an attribute or keyword."""
        self.keys[key], self.lines[key] = value, line

    def copied(self) -> Made:
        """The same, to be changed alone."""
        found = Made(self.kind, self.name, self.line)
        found.keys, found.lines, found.own = dict(self.keys), dict(self.lines), self.own
        self._copy = found
        return found

    def latest(self) -> Made:
        """The last of the copies that were made of it, one after another."""
        found = self
        while found._copy is not None:
            found = found._copy
        return found


def fields_of(made: Made) -> dict[str, Any]:
    """The attributes of an object as a mapping."""
    own = {key: one for key, one in made.keys.items() if key != "__class__"}
    return {**defaults_of(made), **own}


def defaults_of(made: Made) -> dict[str, Any]:
    """What the Trainer's arguments have where nothing sets them, as far as scripts ask for it (TRL's
    own differ by release)."""
    plain = made.kind == "args" and made.name.endswith("TrainingArguments")
    return _OF_ARGUMENTS if plain else {}


def filled(
    kind: str,
    name: str,
    named: dict[str, Any],
    node: ast.Call,
    given: list[Any] | None = None,
    places: tuple[str, ...] = (),
) -> Made:
    """A made thing with a call's arguments as its keys."""
    found = Made(kind, name, node.lineno)
    lines = {k.arg: k.value.lineno for k in node.keywords if k.arg and hasattr(k.value, "lineno")}
    for key, value in {**dict(zip(places, given or [], strict=False)), **named}.items():
        found.set(key, value, lines.get(key, node.lineno))
    return found


def unknown(node: ast.AST) -> Unknown:
    """An expression by its own words."""
    try:
        text = ast.unparse(node)
    except (RecursionError, ValueError):
        text = type(node).__name__
    return Unknown(source=shown(text, limit=42)[1:-1], line=getattr(node, "lineno", 0))


def dotted(node: ast.expr) -> str:
    """'a.b.c' of names and attributes; '' for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def items_of(value: object) -> list[Any] | None:
    """The items of a list, tuple or mapping; None for another value."""
    if isinstance(value, dict):
        return list(value.values())  # pyright: ignore[reportUnknownArgumentType]
    return list(value) if isinstance(value, (list, tuple)) else None  # pyright: ignore[reportUnknownArgumentType]


def change(items: list[Any], node: ast.Call, given: list[Any], *, doubted: bool) -> None:
    """What a method of a list does to it. What is no literal, and what only a run decides to add,
    stands in it as unknown."""
    assert isinstance(node.func, ast.Attribute)
    name = node.func.attr
    if name == "remove" and given and is_plain(given[0]) and given[0] in items and not doubted:
        items.remove(given[0])
        return
    added = given[_ADDED.get(name, len(given)) :]
    if name == "extend" and added:
        inner = items_of(added[0])
        added = added if inner is None else inner
    if len(items) + len(added) <= _MOST_ITEMS:
        items += [unknown(node) if doubted or not _is_scalar(one) else one for one in added]


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def without_tuples(value: object) -> object:
    """A tuple as the list that a job file has for it."""
    items = items_of(value)
    return items if isinstance(value, tuple) else value


def is_small(value: object) -> bool:
    """Whether a value has so few items, each counted wherever it stands, that it can be looked
    through."""
    ahead, count = [value], 0
    while ahead:
        count += 1
        if count > _MOST_ITEMS:
            return False
        ahead += items_of(ahead.pop()) or ()
    return True


def mapping_of(value: Any) -> dict[str, Any]:
    """A mapping itself; an empty one for another value."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def is_plain(value: object) -> bool:
    """Whether a value is literal through and through."""
    items = items_of(value)
    if items is not None:
        return all(is_plain(one) for one in items)
    return _is_scalar(value)


def operated(node: ast.BinOp, left: Any, right: Any) -> object:
    """The result of an operator between two literals."""
    if isinstance(node.op, ast.Sub) and isinstance(right, Unknown):
        most = left.most if isinstance(left, Unknown) else left if type(left) is int else 0
        if most > 0:
            return unknown(node).replace(most=most)
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
        return left + right if len(left) + len(right) < _LONGEST else unknown(node)
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Div):
        made = path_call("Path", [left, right])
        return unknown(node) if made is None else made[0]
    lists = [items_of(one) or [] for one in (left, right)]
    if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
        joined = [*lists[0], *lists[1]]
        return joined if len(joined) < _LONGEST else unknown(node)
    numbers = (bool, int, float)
    if not isinstance(left, numbers) or not isinstance(right, numbers):
        return unknown(node)
    small = max(abs(left), abs(right)) < 1e18
    try:
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult) and small:
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
        if isinstance(node.op, ast.Pow) and abs(left) < 1e4 and abs(right) < 16:
            return left**right
        if isinstance(node.op, ast.LShift) and isinstance(left, int) and 0 <= right < 48:
            return left << int(right)
    except (ArithmeticError, ValueError):
        pass
    return unknown(node)


def compared(node: ast.Compare, left: Any, right: Any) -> object:
    """The truth of one comparison between literals."""
    op = node.ops[0]
    try:
        if isinstance(op, (ast.Eq, ast.Is)):
            return left == right
        if isinstance(op, (ast.NotEq, ast.IsNot)):
            return left != right
        if isinstance(op, (ast.In, ast.NotIn)):
            inside: bool = left in right
            return inside is isinstance(op, ast.In)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if isinstance(op, ast.Lt):
                return left < right
            if isinstance(op, ast.LtE):
                return left <= right
            if isinstance(op, ast.Gt):
                return left > right
            if isinstance(op, ast.GtE):
                return left >= right
    except TypeError:
        pass
    return unknown(node)


def known_call(name: str, given: list[Any]) -> tuple[bool, object]:
    """(whether the text alone says what a call gives, that)."""
    last = name.rpartition(".")[2]
    if last in _TRUE_CALLS or name.endswith("cuda.is_available"):
        return True, True
    if name in ("os.environ.get", "os.getenv", "environ.get", "getenv") and len(given) == 2:
        return is_plain(given[1]), given[1]
    if name == "getattr" and len(given) > 1 and isinstance(given[1], str):
        module = given[0].source if isinstance(given[0], Unknown) else ""
        kind = dtype_of(f"{module}.{given[1]}")
        return bool(kind), kind
    if not given or not all(is_plain(value) for value in given):
        return False, None
    if (path := path_call(name, given)) is not None:
        return True, path[0]
    try:
        if name in _CONVERSIONS and len(given) == 1:
            return True, _CONVERSIONS[name](given[0])
        if name == "len" and (items := items_of(given[0])) is not None:
            return True, len(items)
        if name in ("max", "min") and len(given) > 1:
            return True, max(given) if name == "max" else min(given)
        if name in ("list", "tuple") and (items := items_of(given[0])) is not None:
            return True, items
    except (TypeError, ValueError, OverflowError):
        pass
    return False, None


def dtype_of(name: str) -> str:
    """'bfloat16' of torch.bfloat16; '' for another name."""
    first, _, last = name.rpartition(".")
    return last if first in ("torch", "jnp", "th") and last in _DTYPES else ""


def joined(node: ast.If, one: Any, other: Any) -> Any:
    """A value after a test that only a run decides: what both sides say alike, a model with what
    they say of it, or unknown."""
    if one is MISSING or other is MISSING:
        return other if one is MISSING else one
    if one is other or (is_plain(one) and is_plain(other) and one == other):
        return one
    test = Unknown(source=unknown(node.test).source, line=node.lineno)
    models = [it for it in (one, other) if isinstance(it, Made) and it.kind == "model"]
    if not models:
        return test
    found = models[0].copied()
    for model in models[1:]:
        for key in {*found.keys, *model.keys}:
            if found.keys.get(key, MISSING) != model.keys.get(key, MISSING):
                found.set(key, test, node.lineno)
    return found
