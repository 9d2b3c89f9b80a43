"""The sentences that the repository writes for people: pages, docstrings, and the words of messages
and reports."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CODE = ("estimator", "profiler", "kernels", "benchmarks", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/reference/*.md")
FEWEST = 4  # words of a string in code from which it is a sentence and no name, flag or path
_STOP = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.!?]['\")\]*_]*(?=\s|$)")
_BLOCK = re.compile(r"(?m)^    .*$")
_SCRIPT = re.compile(r"</\w+>|^#")
_NO_WORD = re.compile(r"^[^A-Za-z0-9]+$")


class Sentence(NamedTuple):
    """A sentence and where it stands."""

    place: str
    text: str

    @property
    def num_words(self) -> int:
        return sum(not _NO_WORD.match(word) for word in self.text.split())


def sentences(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of a text. They end at a full stop, at an empty line, and where an item of a
    list begins. A colon or a semicolon does not end one."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=(?:[-*+]|\d+\.)\s)", text):
        for part in _STOP.split(_plain(paragraph)):
            if part.strip():
                yield Sentence(place, part.strip())


def _plain(paragraph: str) -> str:
    """A paragraph with code, links and formulas as one word each."""
    text = re.sub(r"`+[^`]*`+", "code", " ".join(paragraph.split()))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+", "link", text)


@cache
def page_sentences() -> list[Sentence]:
    """Of the pages, without code blocks, tables, headings and comments."""
    found: list[Sentence] = []
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r"(?ms)^\s*(`{3,}|~{3,}).*?^\s*\1\s*$|<!--.*?-->", "\n\n", text)
            text = re.sub(r"(?m)^\s*(\||#|!\[|:::).*$", "\n", text)
            found += sentences(path.relative_to(ROOT).as_posix(), text)
    return found


@cache
def docstring_sentences() -> list[Sentence]:
    """Of every docstring, and of the string below a field. Indented blocks are tables or code."""
    return [
        sentence
        for place, tree in _trees()
        for node in ast.walk(tree)
        for line, text in _docstrings(node)
        for sentence in sentences(f"{place}:{line}", text)
    ]


@cache
def message_sentences() -> list[Sentence]:
    """Of the strings in code that are read by a user: a value of a formatted string is one word."""
    return [
        sentence
        for place, tree in _trees()
        if place.startswith(("estimator", "profiler"))
        for line, text in _strings(tree)
        if len(text.split()) >= FEWEST and not _SCRIPT.search(text)
        for sentence in sentences(f"{place}:{line}", text)
    ]


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), _tree(path)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    for child in node.body:
        text = getattr(getattr(child, "value", None), "value", None)
        if isinstance(child, ast.Expr) and isinstance(text, str):
            yield child.lineno, _BLOCK.sub("\n", inspect.cleandoc(text))


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is no docstring and no part of a formatted one."""
    passed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            passed.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            passed.update(id(part) for part in node.values)
            yield node.lineno, "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in passed:
            yield node.lineno, node.value if isinstance(node.value, str) else ""


def _part(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "value"
