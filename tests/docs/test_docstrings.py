"""Public functions, classes and methods say what they are; the count of those that do not only falls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Public names without a docstring that are still allowed. Write one, then lower the number.
TOP_LEVEL = {"estimator": 0, "profiler": 0, "kernels": 0}
METHODS = {"estimator": 152, "profiler": 0, "kernels": 0}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def undocumented(body: Sequence[ast.stmt], owner: str = "") -> Iterator[str]:
    """Dotted names of public definitions without a docstring, those of public classes included."""
    for node in body:
        if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
            continue
        name = f"{owner}{node.name}"
        if not ast.get_docstring(node):
            yield name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{name}.")


def found_in(package: str) -> list[tuple[str, str]]:
    """(file, dotted name) of every public definition of a package that has no docstring."""
    return [
        (path.relative_to(ROOT).as_posix(), name)
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in undocumented(ast.parse(path.read_text(encoding="utf-8")).body)
    ]


def test_the_count_sees_functions_classes_and_methods_but_nothing_private() -> None:
    source = "def f(): ...\ndef _g(): ...\nclass A:\n  def m(self): ...\n  def _n(self): ...\n"
    documented = 'def f():\n  "Says."\nclass A:\n  "Says."\n  def m(self):\n    "Says."\n'
    assert list(undocumented(ast.parse(source).body)) == ["f", "A", "A.m"]
    assert list(undocumented(ast.parse(documented).body)) == []


@pytest.mark.slow
@pytest.mark.parametrize("package", TOP_LEVEL)
def test_public_names_have_docstrings(package: str) -> None:
    found = found_in(package)
    methods = [place for place in found if "." in place[1]]
    top_level = [place for place in found if "." not in place[1]]
    assert len(top_level) <= TOP_LEVEL[package], top_level
    assert len(methods) <= METHODS[package], methods
