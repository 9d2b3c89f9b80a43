"""The arrows of docs/ARCHITECTURE.md: rooms import lower rooms only, whatever form the import has."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "estimator").is_dir()
)
sys.path.insert(0, str(ROOT / "docs"))

import import_graph as graph  # noqa: E402

FORBIDDEN_IN_CORE = {
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "napkinmath_profiler",
    "napkinmath_kernels",
}
NUMPY_ALLOWED = {"sweep.py"}
SLOW_TO_LOAD = {"numpy", "pandas", "matplotlib", "rich", "dataclasses", "yaml"}
MOST_LOOSE_FILES = 8
# Two modules that import each other at run time, and why they must.
PAIRS: dict[tuple[str, str], str] = {
    (
        "napkinmath.models.layers.head",
        "napkinmath.models.layers.workload_heads",
    ): "a head says what another loss makes of it, and that head holds it",
}


def roots(path: Path, *, at_load_only: bool) -> set[str]:
    """First words of everything that a file imports."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if at_load_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def core_files() -> list[Path]:
    return sorted(graph.CORE.rglob("*.py"))


@pytest.mark.parametrize("root", ["estimator", "profiler", "kernels"])
def test_path_roots_are_not_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", core_files(), ids=lambda p: str(p.relative_to(graph.CORE)))
def test_core_imports_neither_torch_nor_the_other_packages(path: Path) -> None:
    assert not roots(path, at_load_only=False) & FORBIDDEN_IN_CORE
    if path.name not in NUMPY_ALLOWED:
        assert not roots(path, at_load_only=True) & SLOW_TO_LOAD


def test_every_folder_is_a_room_and_few_files_are_loose() -> None:
    folders = {p.name for p in graph.CORE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(graph.ROOMS)
    assert len(list(graph.CORE.glob("*.py"))) <= MOST_LOOSE_FILES


@pytest.mark.slow
@pytest.mark.parametrize("path", core_files(), ids=lambda p: str(p.relative_to(graph.CORE)))
def test_rooms_import_lower_rooms_only(path: Path) -> None:
    """At the top, within functions, for the type checker and by name in a string."""
    if graph.name_of(path) in graph.DOORS:
        return
    for found in graph.imports_of(path):
        assert found.target not in graph.DOORS, f"{found} goes through the front door"
        above = graph.rank(found.target) > graph.rank(found.source)
        assert not above, f"{path}:{found.line} imports {found.target}, of a higher room"


@pytest.mark.slow
def test_modules_that_import_each_other_are_a_pair_with_a_reason() -> None:
    assert set(graph.circles()) == set(PAIRS)


@pytest.mark.slow
def test_every_kind_of_import_is_seen() -> None:
    """The reader itself: all four forms, each from a file that has it."""
    kinds = {found.kind for found in graph.all_imports()}
    assert kinds == set(graph.Kind)
    named = {(found.source, found.target) for found in graph.all_imports()}
    assert ("napkinmath.cli.commands", "napkinmath.cli.plan") in named  # a string in a table
    assert ("napkinmath.models.families", "napkinmath.models.families") not in named


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: p.name)
def test_kernels_import_nothing_of_ours(path: Path) -> None:
    assert not roots(path, at_load_only=False) & {"napkinmath", "napkinmath_profiler"}
