"""constraints.txt pins what the extras name, by version and hash, and names no address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"[a-z0-9][a-z0-9._-]*==\S+ --hash=sha256:[0-9a-f]{64}")
PINNED_IN_THE_MAKEFILE = {"torch"}


def name_of(requirement: str) -> str:
    """'mkdocstrings[python]>=1.0' -> 'mkdocstrings', as pip compares names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def pinned() -> dict[str, str]:
    """Versions by name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all(map(LINE.fullmatch, packages))
    halves = (line.split(" ")[0].split("==") for line in packages)
    return {name_of(name): version for name, version in halves}


def test_every_requirement_is_pinned() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    every = [*project["dependencies"], *(each for extra in extras for each in extra)]
    wanted = [each for each in every if "python_version <" not in each]  # of an older Python
    versions = pinned()
    assert {name_of(each) for each in wanted} - versions.keys() == PINNED_IN_THE_MAKEFILE
    exact = dict(each.split("==") for each in wanted if "==" in each)
    assert {name: versions[name_of(name)] for name in exact} == exact
