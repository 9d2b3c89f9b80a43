"""Who imports whom in the estimator, read from the syntax trees: at the top, in functions, for the
type checker, by name in a string.

ROOMS is the one list of the rooms and their rank; `tests/whole/test_import_arrows.py` holds the code to
it, and `docs/generate_architecture.py` draws it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "estimator" / "napkinmath"
# Low to high: a room imports itself and what stands before it.
ROOMS = (
    "base",
    "config",
    "ir",
    "catalog",
    "ops",
    "lowering",
    "models",
    "memory",
    "timing",
    "calibration",
    "answers",
    "inputs",
    "planning",
    "exports",
    "report",
    "serving",
    "cli",
)
LOOSE = {"estimate": "inputs"}  # loose modules and the room whose rank they have
DOORS = ("napkinmath", "napkinmath.__main__", "napkinmath.moved")  # name what is anywhere
NAMED = re.compile(r"napkinmath(\.[a-z_0-9]+)+")


class Kind(Enum):
    """When an import is carried out."""

    LOADED = "when the module is loaded"
    CALLED = "when a function is called"
    TYPES = "for the type checker"
    NAMED = "by a name in a string"


class Import(NamedTuple):
    """One import: the module with it, the module that it names, and where."""

    source: str
    target: str
    kind: Kind
    line: int


@cache
def modules() -> dict[str, Path]:
    """Every module of the estimator by its dotted name."""
    return {name_of(path): path for path in sorted(CORE.rglob("*.py"))}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of a module; '' for the doors of the package."""
    if module in DOORS:
        return ""
    name = module.split(".")[1]
    return LOOSE.get(name, name)


def rank(module: str) -> int:
    """Place of a module's room in ROOMS; ValueError for a room that is not listed."""
    return ROOMS.index(room_of(module))


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of the estimator's own modules in a file."""
    source, tree = name_of(path), ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    called = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        for name in _named(node):
            target = known(name)
            if target is not None and target != source:
                kind = Kind.CALLED if id(node) in called else Kind.LOADED
                kind = Kind.TYPES if id(node) in for_types else kind
                kind = Kind.NAMED if isinstance(node, ast.Constant) else kind
                yield Import(source, target, kind, getattr(node, "lineno", 0))


def _named(node: ast.AST) -> list[str]:
    """Dotted names in an import statement, or in a string that names a module or the start of
    one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        found = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in modules() else node.module for name in found]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        match = NAMED.fullmatch(node.value.partition(":")[0].rstrip("."))
        return [match[0]] if match else []
    return []


def known(name: str) -> str | None:
    """The estimator's module of that name, or the package that the name begins with."""
    if not name.startswith("napkinmath."):
        return None
    while name not in modules() and "." in name:
        name = name.rpartition(".")[0]
    return name if name in modules() and name != "napkinmath" else None


@cache
def all_imports() -> tuple[Import, ...]:
    """Every import in the estimator, each once a line."""
    return tuple(found for path in modules().values() for found in dict.fromkeys(imports_of(path)))


def circles() -> list[tuple[str, ...]]:
    """Groups of modules that import each other at run time, directly or around; a table that names
    modules does not depend on them."""
    after: dict[str, set[str]] = {name: set() for name in modules()}
    for found in all_imports():
        if found.kind in (Kind.LOADED, Kind.CALLED) and found.source not in DOORS:
            after[found.source].add(found.target)
    reach = {name: _reachable(name, after) for name in after}
    groups = {tuple(sorted(m for m in reach[n] if n in reach[m])) for n in after}
    return sorted(group for group in groups if len(group) > 1)


def _reachable(start: str, after: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in after[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found
