"""Public functions, classes and methods say what they are; the count of those that do not only falls."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("estimator", "profiler", "kernels")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NAMED_FILE = re.compile(r"\(([a-z_0-9/]+\.py)\)")

Inherited = dict[str, set[str]]  # names that a class documents, its bases' among them


def undocumented(
    body: Sequence[ast.stmt], inherited: Inherited | None = None, owner: str = ""
) -> Iterator[str]:
    """Dotted names of public definitions without a docstring, those of public classes included; an
    override has that of the base class."""
    above = set[str]() if inherited is None else inherited.get(owner.rstrip("."), set())
    for node in body:
        if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
            continue
        name = f"{owner}{node.name}"
        if not ast.get_docstring(node) and node.name not in above:
            yield name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, inherited, f"{name}.")


def inherited_in(trees: Mapping[str, ast.Module]) -> Inherited:
    """By class name, what the bases document; of a protocol, what the file documents that its
    docstring names."""
    classes = [node for tree in trees.values() for node in classes_of(tree)]
    own: Inherited = {}
    for node in classes:
        own.setdefault(node.name, set()).update(documented(node))
    bases = {node.name: [base_name(base) for base in node.bases] for node in classes}
    found = {name: set[str]() for name in own}
    for name in found:
        left, seen = list(bases[name]), set[str]()
        while left:
            base = left.pop()
            if base in own and base not in seen:
                seen.add(base)
                found[name] |= own[base]
                left += bases[base]
    for node in classes:
        if "Protocol" in bases[node.name]:
            named = NAMED_FILE.findall(ast.get_docstring(node) or "")
            trees_named = [tree for path, tree in trees.items() if path.endswith(tuple(named))]
            for tree in trees_named if named else ():
                for implementing in classes_of(tree):
                    found[node.name] |= documented(implementing)
    return found


def classes_of(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def base_name(base: ast.expr) -> str:
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def documented(owner: ast.ClassDef) -> set[str]:
    """Members of a class that have a docstring, or the string after a field."""
    found = {
        node.name
        for node in owner.body
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node)
    }
    for field, after in itertools.pairwise(owner.body):
        says = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if says and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found.add(field.target.id)
    return found


def found_in(package: str) -> list[tuple[str, str]]:
    """(file, dotted name) of every public definition of a package that has no docstring."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    inherited = inherited_in(trees)
    return [(path, name) for path, t in trees.items() for name in undocumented(t.body, inherited)]


def test_the_count_sees_functions_classes_and_methods_but_nothing_private() -> None:
    source = "def f(): ...\ndef _g(): ...\nclass A:\n  def m(self): ...\n  def _n(self): ...\n"
    documented = 'def f():\n  "Says."\nclass A:\n  "Says."\n  def m(self):\n    "Says."\n'
    assert list(undocumented(ast.parse(source).body)) == ["f", "A", "A.m"]
    assert list(undocumented(ast.parse(documented).body)) == []


def test_overrides_and_protocols_have_the_docstrings_of_what_they_name() -> None:
    source = (
        'class A:\n  "Says."\n  def m(self):\n    "Says."\n  def n(self): ...\n'
        'class B(A):\n  "Says."\n  def m(self): ...\n  def n(self): ...\n'
        'class P(Protocol):\n  "Says (a/b.py)."\n  def m(self): ...\n  def n(self): ...\n'
    )
    tree = ast.parse(source)
    assert list(undocumented(tree.body, inherited_in({"x/a/b.py": tree}))) == ["A.n", "B.n", "P.n"]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    assert found_in(package) == []
