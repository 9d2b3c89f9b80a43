"""One word for each meaning: the glossary's terms, and the names of public classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.M)
PACKAGES = ("estimator", "profiler", "kernels")


def glossary() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    return [row for row in ROW.findall(text) if row[0] != "term"]


def public_classes() -> dict[str, list[str]]:
    """name -> files, of classes at the top of a module without a leading underscore."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def test_a_term_has_one_meaning_and_a_meaning_one_term() -> None:
    terms, meanings = zip(*glossary(), strict=True)
    assert len(terms) > 40
    assert len({t.lower() for t in terms}) == len(terms)
    assert len({re.sub(r" \(`\w+`\)", "", m).lower() for m in meanings}) == len(meanings)


def test_no_two_public_classes_share_a_name() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == {}


def test_classes_that_the_glossary_names_exist() -> None:
    named = re.findall(r"\(`(\w+)`\)", "".join(meaning for _, meaning in glossary()))
    assert len(named) > 15 and set(named) <= set(public_classes())
