"""The figures of docs/accuracy.md and of the README are those of the recorded readings."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import generate_accuracy as made


def test_the_pages_show_what_was_recorded() -> None:
    for path, text in made.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python docs/generate_accuracy.py"


def test_a_reading_becomes_one_row_a_source() -> None:
    reading = (
        "## Error of device, one GPU\n\n| source | rows | median | 90th percentile | signed |\n"
        "|---|---|---|---|---|\n| b (x) | 2 | 1.0% | 3.0% | +1% |\n| all rows | 2 | 1% | 3% | 1% |\n"
        "\n## Error of tokens/s, one GPU\n\n| source | rows | median | 90th percentile | signed |\n"
        "|---|---|---|---|---|\n| a | 1 | 2.0% | 2.0% | +1% |\n"
    )
    assert made.by_source(reading).splitlines()[2:] == [
        "| a |  | 1 rows: 2.0%, 2.0% |",
        "| b | 2 rows: 1.0%, 3.0% |  |",
    ]
