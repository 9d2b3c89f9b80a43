"""--markdown: tables for an issue, a wiki or a README, as GitHub reads them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.report.formats import Answer, Sheet

# What GitHub Flavored Markdown gives a meaning within a cell (spec 2.4 and 4.10): the bar ends it.
_SPECIAL = "\\`*_[]<>|~#&$"


def as_markdown(answer: Answer) -> str:
    """Each table under its title; no line is cut or wrapped."""
    return "\n\n".join(_sheet(sheet) for sheet in answer.sheets())


def _sheet(sheet: Sheet) -> str:
    rule = [("---:" if head in sheet.right else "---") for head in sheet.heads]
    lines = [_line([cell(text) for text in sheet.heads]), _line(rule)]
    lines += [_line([cell(text) for text in row]) for row in sheet.rows]
    title = [f"### {cell(sheet.title)}", ""] if sheet.title else []
    return "\n".join([*title, *lines])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """Text that stands for itself, on one line."""
    return "".join(f"\\{c}" if c in _SPECIAL else c for c in " ".join(text.split()))
