"""The generated pages are up to date, the reference names every public name, and the site builds
without a warning or a foreign resource."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import napkinmath
import napkinmath_kernels
import pytest

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
)


def script(name: str) -> ModuleType:
    """A script of docs/, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_line_page_is_what_the_tables_say() -> None:
    """In a process of its own: other tests add stacks that only published tables have."""
    command = [sys.executable, str(ROOT / "docs" / "generate_cli_reference.py"), "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "estimator")})
    assert done.returncode == 0, "run: python docs/generate_cli_reference.py"


def directives(page: str) -> list[str]:
    return DIRECTIVE.findall((ROOT / "docs" / "reference" / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "package"), [("estimator.md", napkinmath), ("kernels.md", napkinmath_kernels)]
)
def test_reference_names_every_public_name_once(page: str, package: ModuleType) -> None:
    documented = sorted(path.rpartition(".")[2] for path in directives(page))
    assert documented == sorted(name for name in package.__all__ if not name.startswith("__"))
    for path in directives(page):
        module, _, name = path.rpartition(".")
        assert getattr(package, name) is getattr(importlib.import_module(module), name), path


@pytest.mark.parametrize("path", directives("profiler.md"))
def test_reference_of_the_profiler_names_what_is_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__doc__, path


def test_links_hold_on_the_site() -> None:
    pytest.importorskip("mkdocs")
    pages = script("site_pages")
    assert pages.site_path("README.md") == "index.md"
    assert pages.site_path("docs/answers.md") == "answers.md"
    assert (
        pages.site_path("notebooks/01_napkin_math_from_zero.ipynb")
        == "notebooks/01_napkin_math_from_zero.md"
    )
    assert pages.repository_path("answers.md") == "docs/answers.md"
    assert (
        pages.with_room("text:\n- item\n- item\n\n```\ntext\n- code\n```")
        == "text:\n\n- item\n- item\n\n```\ntext\n- code\n```"
    )
    assert pages.LINK.search("see [page](https://example.org)") is None


def _search_from_a_file(site: Path) -> None:
    """A page that is opened from the disk finds what is asked for, where there is a browser."""
    assert (site / "search" / "search_index.js").stat().st_size > 100_000
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None or os.environ.get("NO_BROWSER"):
        return
    address = (site / "index.html").as_uri() + "?q=checkpointing"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000")
    command = [browser, *flags, "--dump-dom", address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert re.search(r"md-search-result__meta\">[0-9]+ matching documents", page)


def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    surroundings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert {
        "index.html",
        "answers.html",
        "cli.html",
        "ARCHITECTURE.html",
        "reference/estimator.html",
        "notebooks/index.html",
    } <= made
    foreign = [
        str(path)
        for path in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css"))
        if LOADED.search(path.read_text(encoding="utf-8"))
    ]
    assert not foreign
    _search_from_a_file(tmp_path)
    reference = (tmp_path / "reference" / "estimator.html").read_text(encoding="utf-8")
    assert "Prices one training step of a model." in reference and "micro_batch_size" in reference
    notebook = (tmp_path / "notebooks" / "01_napkin_math_from_zero.html").read_text(
        encoding="utf-8"
    )
    assert (
        "01_napkin_math_from_zero-1.png" in notebook
        and (tmp_path / "notebooks" / "01_napkin_math_from_zero-1.png").stat().st_size > 5000
    )
