"""The report in docs/using.md is what the command prints."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from generate_report import PAGE, printed, shown

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
ELSEWHERE = re.compile(
    r"^  also fits.*?(?=^  assumed)", re.DOTALL | re.MULTILINE
)  # every new GPU of the catalog changes it
BARS = re.compile(r"[\u2580-\u259f]+")
TOLERANCE = 0.02  # a rule that moves a figure by less need not touch the page in the same commit


def test_the_page_shows_what_the_command_prints() -> None:
    found = shown(PAGE.read_text(encoding="utf-8"))
    page, now = (
        ELSEWHERE.sub("", BARS.sub("", text)) for text in (found["report"], printed(found["flags"]))
    )
    advice = "run python docs/generate_report.py"
    assert words(page) == words(now), advice
    for before, after in zip(numbers(page), numbers(now), strict=True):
        assert math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=0.011), (
            f"{before} is {after} now: {advice}"
        )


def words(text: str) -> list[str]:
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]
