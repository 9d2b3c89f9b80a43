"""The examples of CONTRIBUTING are commits of this repository that touch what they are examples
of."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(
    r"^\| (?P<what>[^|]+) \| (?P<where>[^|]+) \|[^|]+\| `(?P<commit>[0-9a-f]{7,40})` \|$"
)
ROWS = [
    (found["what"].strip(), found["where"], found["commit"])
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    if (found := ROW.match(line))
]


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout


def has_history() -> bool:
    """Whether this is a clone with all its commits: a source archive has none."""
    try:
        return git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def test_every_kind_of_addition_has_its_row() -> None:
    assert len(ROWS) >= 10
    assert len({what for what, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("what", "where", "commit"), ROWS, ids=[what for what, _, _ in ROWS])
def test_the_example_touches_the_place_that_it_names(what: str, where: str, commit: str) -> None:
    if not has_history():
        pytest.skip("no history here: an archive or a shallow clone")
    touched = git("show", "--name-only", "--format=", commit)
    places = [Path(place.rstrip("/")).name for place in re.findall(r"`([\w/.]+)`", where)]
    # rooms were made later than some examples: the name of the file or folder is the same
    assert any(place in touched for place in places), (what, places, touched)
