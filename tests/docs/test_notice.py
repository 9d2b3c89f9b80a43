"""Every bundled table says where it comes from, when it was taken and under which licence; NOTICE
is what the manifest says."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "estimator").is_dir()
)
sys.path.insert(0, str(ROOT / "docs"))

import generate_notice as notice  # noqa: E402

TABLE = notice.manifest()
FILES = {row["path"]: row for row in TABLE["files"]}
# what is written by hand: code, prose, settings of tools
CODE = {".py", ".md", ".toml", ".yml", ".typed", ""}
SETTINGS = {"constraints.txt", "sbom.cdx.json", "LICENSE", "NOTICE", "Makefile"}


def tracked() -> list[str]:
    """Files of the repository, committed or about to be; a copy without its history has none."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def is_data(name: str) -> bool:
    path = Path(name)
    return path.suffix not in CODE and path.name not in SETTINGS and path.parts[0][0] != "."


def rows_of(name: str) -> list[str]:
    return [pattern for pattern in FILES if fnmatch.fnmatch(name, pattern)]


def test_every_file_of_data_has_one_row() -> None:
    found = {name: rows_of(name) for name in tracked() if is_data(name)}
    assert len(found) > 50
    assert not [name for name, rows in found.items() if len(rows) != 1], (
        "add a row to docs/data_sources.json and run python docs/generate_notice.py"
    )


def test_a_new_file_would_be_missed() -> None:
    assert is_data("benchmarks/data/new.csv")
    assert not rows_of("benchmarks/data/new.csv")
    assert not rows_of("estimator/napkinmath/catalog/new.json")


@pytest.mark.parametrize("pattern", FILES)
def test_a_row_says_all(pattern: str) -> None:
    row = FILES[pattern]
    for field in ("holds", "taken", "licence"):
        assert len(row[field].split()) > 1, field
    assert any(fnmatch.fnmatch(name, pattern) for name in tracked()), "no such file"
    if row.get("header"):
        for name in fnmatch.filter(tracked(), pattern):
            header = json.loads((ROOT / name).read_text(encoding="utf-8"))
            assert all(header.get(key) for key in ("source", "commit", "licence")), name


@pytest.mark.parametrize("pattern", [p for p, row in FILES.items() if "by_row" in row])
def test_every_line_of_a_table_has_a_source(pattern: str) -> None:
    assert all(notice.row_sources(ROOT / pattern, FILES[pattern]["by_row"]))


def test_every_repository_is_one_that_something_was_taken_from() -> None:
    used = {name for row in FILES.values() for name in notice.origins_of(row)}
    assert set(TABLE["origins"]) <= used
    for name, origin in TABLE["origins"].items():
        assert origin["licence"], name
        assert origin["licence_read"], f"{name}: where the licence was read"
    said = " ".join(notice.text().split())
    assert used == {name for name in used if name in said}


def test_the_notice_is_what_the_script_writes() -> None:
    assert (ROOT / "NOTICE").read_text(encoding="utf-8") == notice.text(), (
        "run python docs/generate_notice.py"
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("pytorch/torchtune: README.md [Optimization flags]", "pytorch/torchtune"),
        ("Lightning-AI/litgpt litgpt/config.py", "Lightning-AI/litgpt"),
        ("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-1.2B"),
        ("arXiv 1910.10683 section 3.7", ""),
        ("transformers 5.23 models/mllama/configuration_mllama.py", ""),
    ],
)
def test_a_repository_is_read_off_the_start_of_a_source(source: str, name: str) -> None:
    assert notice.repository(source) == name
