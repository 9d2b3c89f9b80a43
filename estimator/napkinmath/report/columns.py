"""Rows under heads: columns as wide as their widest cell on a terminal, tab-separated where a
program reads the output."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def print_columns(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    indent: str = "",
) -> None:
    """Prints the rows; columns named in `right` are aligned to the right."""
    if not sys.stdout.isatty():
        print("\t".join(heads))
        for row in rows:
            print("\t".join(row))
        return
    print("\n".join(aligned(heads, rows, right=right, indent=indent)))


def aligned(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    indent: str = "",
) -> list[str]:
    """The lines of the table, not cut."""
    sizes = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines: list[str] = []
    for row in (heads, *rows):
        cells = [
            cell.rjust(size) if head in right else cell.ljust(size)
            for head, cell, size in zip(heads, row, sizes, strict=True)
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return lines
