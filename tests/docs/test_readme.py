"""README.md: short, with pictures that the commands draw and figures that docs/accuracy.md has."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from generate_readme_pictures import IMAGES, ROOT, timeline

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 120
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# bullet of README.md -> rows of the table of docs/accuracy.md, and how many of each row's figures
ROWS = {
    "allocated memory": (("allocated, one GPU", 2), ("allocated, several GPUs", 2)),
    "fits or not": (("fits or runs out of memory, balanced", 1),),
    "tokens/s": (("tokens/s, one GPU", 2), ("tokens/s, one node", 2), ("tokens/s, many nodes", 2)),
}


def test_it_is_short_without_tables_and_names_what_ci_runs() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES
    assert not [line for line in PAGE.splitlines() if line.startswith("|")]
    assert "\nmake test " in PAGE
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


def test_its_accuracy_is_that_of_the_accuracy_page() -> None:
    table = {
        cells[1].strip(): cells[3].strip()
        for line in (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and len(cells := line.split("|")) == 5
    }
    bullets = dict(re.findall(r"^- \*\*([^*]+)\*\*:? (.*)$", PAGE, re.MULTILINE))
    assert ROWS.keys() <= bullets.keys()
    for name, rows in ROWS.items():
        shown = re.findall(r"[\d.]+%", bullets[name])
        wanted = [re.findall(r"[\d.]+%", table[row])[:count] for row, count in rows]
        assert shown == [figure for row in wanted for figure in row], name


def test_its_timeline_is_what_its_command_draws() -> None:
    kept = (IMAGES / "timeline.svg").read_text(encoding="utf-8")
    advice = "run python docs/generate_readme_pictures.py timeline"
    assert labels(kept) == labels(timeline()), advice


def labels(picture: str) -> list[str]:
    """Texts of the picture without their figures."""
    return [NUMBER.sub("#", text) for text in re.findall(r"<text[^>]*>([^<]+)", picture)]
