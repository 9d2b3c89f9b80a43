"""What the text of a script says of its expressions."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod

from napkinmath.inputs.scripts.python_values import (
    MISSING,
    Made,
    Unknown,
    compared,
    defaults_of,
    dotted,
    dtype_of,
    fields_of,
    is_plain,
    is_small,
    items_of,
    operated,
    unknown,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Scope = dict[str, Any]

MOST_STEPS = 50_000
DEEPEST = 60
_MOST_ITEMS = 256


class Expressions(ABC):
    """Expressions with the names that a script has bound so far."""

    def __init__(self) -> None:
        self.scope: Scope = {"__name__": "__main__"}
        self.steps = self.depth = 0

    @abstractmethod
    def call(self, node: ast.Call, scope: Scope) -> Any:
        """What a call gives."""

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """What the text says of an expression."""
        self.steps += 1
        if self.depth > DEEPEST or self.steps > MOST_STEPS:
            return Unknown(source="code nested too deeply", line=getattr(node, "lineno", 0))
        self.depth += 1
        found = self._value(node, scope)
        self.depth -= 1
        return found

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        if isinstance(node, ast.Constant):
            return node.value if is_plain(node.value) else unknown(node)
        if isinstance(node, ast.Name):
            return scope.get(node.id, self.scope.get(node.id, unknown(node)))
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        if isinstance(node, ast.Call):
            return self.call(node, scope)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            items = [self.value(one, scope) for one in node.elts]
            if not is_small(items):
                return unknown(node)
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Dict):
            return self._dict(node, scope)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, scope)
        if isinstance(node, ast.DictComp) and (kept := _filtered(node)) is not None:
            return self.value(kept, scope)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self._comprehension(node, scope)
        if isinstance(node, ast.JoinedStr):
            return self._formatted(node, scope)
        if isinstance(node, (ast.NamedExpr, ast.Await)):
            return self.value(node.value, scope)
        return self._operator(node, scope)

    def _operator(self, node: ast.expr, scope: Scope) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left, scope), self.value(node.right, scope)
            return operated(node, left, right)
        if isinstance(node, ast.UnaryOp):
            inner = self.value(node.operand, scope)
            if isinstance(node.op, ast.Not) and (is_plain(inner) or isinstance(inner, Made)):
                return not inner
            if isinstance(node.op, ast.USub) and isinstance(inner, (int, float)):
                return -inner
        if isinstance(node, ast.BoolOp):
            found: Any = None
            for part in node.values:
                found = self.value(part, scope)
                if isinstance(found, Unknown):
                    return unknown(node)
                if bool(found) == isinstance(node.op, ast.Or):
                    return found
            return found
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
            if is_plain(left) and is_plain(right):
                return compared(node, left, right)
            if isinstance(left, Made) and right is None:
                return isinstance(node.ops[0], ast.IsNot)
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, scope)
            if is_plain(test):
                return self.value(node.body if test else node.orelse, scope)
            one, other = self.value(node.body, scope), self.value(node.orelse, scope)
            return one if is_plain(one) and one == other else unknown(node)
        return unknown(node)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        if found := dtype_of(dotted(node)):
            return found
        owner = self.value(node.value, scope)
        if not isinstance(owner, Made):
            return unknown(node)
        if node.attr == "config" and owner.kind == "model":
            config = Made("object", "config", node.lineno)
            config.model = owner
            return config
        if node.attr == "__dict__":
            return fields_of(owner)
        default = defaults_of(owner).get(node.attr, MISSING)
        return owner.keys.get(node.attr, unknown(node) if default is MISSING else default)

    def _dict(self, node: ast.Dict, scope: Scope) -> Any:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value, scope)
            name = None if key is None else self.value(key, scope)
            if key is None and isinstance(inner, dict):
                found |= inner
            elif isinstance(name, (str, int)):
                found[name] = inner  # pyright: ignore[reportArgumentType]
        return found if is_small(found) else unknown(node)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope
    ) -> Any:
        """The list of `[f(x) for x in items if ...]` over items that the text says."""
        source = node.generators[0]
        over = self.value(source.iter, scope)
        items = None if isinstance(over, dict) else items_of(over)
        if len(node.generators) > 1 or not isinstance(source.target, ast.Name) or items is None:
            return unknown(node)
        found: list[Any] = []
        for item in items[:_MOST_ITEMS]:
            inner = {**scope, source.target.id: item}
            kept = [self.value(test, inner) for test in source.ifs]
            if not all(is_plain(one) for one in kept):
                return unknown(node)
            if all(kept):
                found.append(self.value(node.elt, inner))
        return found if len(items) <= _MOST_ITEMS and is_small(found) else unknown(node)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, key = self.value(node.value, scope), self.value(node.slice, scope)
        if isinstance(owner, Made) and owner.kind == "object" and isinstance(key, str):
            return owner.keys.get(key, unknown(node))
        whole: Any = owner if items_of(owner) is not None else None
        try:
            return unknown(node) if whole is None else whole[key]
        except (LookupError, TypeError):
            return unknown(node)

    def _formatted(self, node: ast.JoinedStr, scope: Scope) -> Any:
        """An f-string; one whose last part after '/' is plain is a path with a known end."""
        parts: list[str] = []
        end_is_known = False
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            value = self.value(inner, scope)
            if isinstance(value, (str, int, float)) and not getattr(part, "format_spec", None):
                parts.append(str(value))
                end_is_known |= "/" in parts[-1]
            else:
                parts.append(f"{{{unknown(inner).source}}}")
                end_is_known = False
        text = "".join(parts)
        is_known = not any(part.startswith("{") for part in parts)
        return text if is_known or (end_is_known and not text.endswith("/")) else unknown(node)


def _filtered(node: ast.DictComp) -> ast.expr | None:
    """The mapping of `{k: v for k, v in mapping.items() if ...}`, of which a library's own names
    are kept; None for another comprehension."""
    source = node.generators[0]
    call, target = source.iter, source.target
    if (
        len(node.generators) > 1
        or not isinstance(call, ast.Call)
        or not isinstance(target, ast.Tuple)
    ):
        return None
    names = [one.id for one in (*target.elts, node.key, node.value) if isinstance(one, ast.Name)]
    of_items = isinstance(call.func, ast.Attribute) and call.func.attr == "items"
    if not of_items or len(names) != 4 or names[:2] != names[2:]:
        return None
    assert isinstance(call.func, ast.Attribute)
    return call.func.value
