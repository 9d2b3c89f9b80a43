"""Writes the figures of docs/accuracy.md and of the README from the recorded readings of published
runs (benchmarks/results/published); a test holds both pages to them.

Usage: python docs/generate_accuracy.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "published"
ACCURACY, README = ROOT / "docs" / "accuracy.md", ROOT / "README.md"
ERRORS = re.compile(r"^## Error of (?P<what>.+)\n\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
NO_SOURCE = ("source", "all rows", "average over sources")


def cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def by_source(reading: str) -> str:
    """One table of a reading's errors: a row a source, a column a quantity and place."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for match in ERRORS.finditer(reading):
        columns.append(match["what"])
        for line in match["rows"].splitlines():
            name, *figures = cells(line)
            name = name.partition(" (")[0]
            if name not in NO_SOURCE and not name.startswith("-"):
                rows, median, far = figures[:3]
                found.setdefault(name, {})[match["what"]] = f"{rows} rows: {median}, {far}"
    lines = [f"| source | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in sorted(found):
        shown = (found[name].get(column, "") for column in columns)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def blind_figures(summary: str) -> dict[str, str]:
    """The blind column of the summary by its row's name."""
    rows = [cells(line) for line in summary.splitlines() if line.startswith("|")]
    return {row[0]: row[2] for row in rows}


def in_short(blind: dict[str, str]) -> str:
    """The README's four lines of accuracy."""

    def errors(name: str) -> str:
        return blind[name].partition(";")[0]

    def inside(name: str) -> str:
        return blind[name].partition("; ")[2].partition(" ")[0]

    right, _, rest = blind["fits or runs out of memory, balanced"].partition(":")
    return (
        f"- **allocated memory**: {errors('allocated, one GPU')} on one GPU;"
        f" {errors('allocated, several GPUs')} on several;\n"
        f"- **fits or not**: {right} right of {rest.rpartition(' of ')[2]} runs, fits and failures"
        " weighed alike;\n"
        f"- **tokens/s**: {errors('tokens/s, one GPU')} on one GPU; {errors('tokens/s, one node')}"
        f" on one node; {errors('tokens/s, many nodes')} on many;\n"
        f"- **printed ranges**: {inside('allocated, one GPU')} of allocated figures on one GPU lie"
        f" inside, and {inside('tokens/s, one GPU')} of its speeds."
    )


def between(page: str, start: str, end: str, text: str) -> str:
    """The page with the text between two marks, each a line of its own."""
    before, _, rest = page.partition(f"<!-- {start} -->")
    _, _, after = rest.partition(f"<!-- {end} -->")
    return f"{before}<!-- {start} -->\n\n{text}\n\n<!-- {end} -->{after}"


def pages() -> dict[Path, str]:
    """Both pages as the recorded readings make them."""
    summary = (RECORDED / "summary.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in summary.splitlines() if line.startswith("|"))
    page = between(ACCURACY.read_text(encoding="utf-8"), "summary", "end of summary", table)
    informed = (RECORDED / "informed.md").read_text(encoding="utf-8")
    page = between(page, "by source", "end of by source", by_source(informed))
    for name in ("held out speed", "held out time"):
        kept = (RECORDED / f"{name.replace(' ', '_')}.md").read_text(encoding="utf-8")
        page = between(page, name, f"end of {name}", kept.strip())
    readme = README.read_text(encoding="utf-8")
    lines = re.compile(r"^- \*\*allocated memory\*\*.*?its speeds\.$", re.DOTALL | re.MULTILINE)
    short = in_short(blind_figures(summary))
    return {ACCURACY: page, README: lines.sub(lambda _: short, readme)}


def main() -> int:
    """Writes the pages; with --check only says by the exit code whether they are as made."""
    made = pages()
    if "--check" in sys.argv[1:]:
        return int(any(text != path.read_text(encoding="utf-8") for path, text in made.items()))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
