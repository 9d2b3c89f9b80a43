"""Rows under heads: as wide as the terminal on a terminal, tab-separated where a program reads the
output.

What all rows share stands once above them. Where columns are too wide, heads break between words,
then cells of text; then the columns that matter least are left out, and named below.
"""

from __future__ import annotations

import os
import sys

from napkinmath.report.screen import NARROWEST, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.report.formats import Sheet

GAP = 2
NO_WIDTH = 100_000
LEAST_TEXT = 14  # columns of a cell of text that is broken


def print_sheet(sheet: Sheet) -> None:
    """Prints the rows."""
    if not sys.stdout.isatty():
        print("\t".join(sheet.heads))
        for row in sheet.rows:
            print("\t".join(row))
        return
    print("\n".join(fitted(sheet, terminal_columns())))


def terminal_columns() -> int:
    """Columns of the terminal, COLUMNS where set; what is read by a program has no width."""
    if not sys.stdout.isatty():
        return NO_WIDTH
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(NARROWEST, int(columns))
    try:
        found = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return NARROWEST
    return max(NARROWEST, found)


def folded(text: str, width: int, *, indent: str = "") -> str:
    """A line of prose broken between words; what follows the first line is indented."""
    rows = wrap(text, width)
    if len(rows) > 1:
        rows = [rows[0], *wrap(" ".join(text[len(rows[0]) :].split()), width - len(indent))]
    return f"\n{indent}".join(rows)


def fitted(sheet: Sheet, width: int, *, indent: str = "") -> list[str]:
    """The lines of the table, none wider than `width` (at least NARROWEST)."""
    rows = [(*sheet.heads,), *sheet.rows]
    same = [i for i in range(len(sheet.heads)) if _is_shared(sheet, i)]
    own = [i for i in range(len(sheet.heads)) if i not in same] or same
    above = [
        f"{sheet.heads[i]} {sheet.rows[0][i]}"
        for i in same
        if i not in own and sheet.rows[0][i] not in ("", "-")
    ]
    room = width - len(indent)
    kept, sizes = _sizes(sheet, own, room)
    lines = [indent + line for line in wrap("all: " + ", ".join(above), room)] if above else []
    for row in rows:
        lines += [indent + line for line in _lines(sheet, row, kept, sizes)]
    gone = [sheet.heads[i] for i in own if i not in kept]
    if gone:
        text = f"left out at {width} columns: {', '.join(gone)}"
        lines += [indent + line for line in wrap(text, room)]
    return lines


def _is_shared(sheet: Sheet, column: int) -> bool:
    """Whether all of several rows say the same there; the first column names the row."""
    cells = {row[column] for row in sheet.rows}
    return column > 0 and len(sheet.rows) > 1 and len(cells) == 1


def _sizes(sheet: Sheet, own: Sequence[int], room: int) -> tuple[list[int], dict[int, int]]:
    """The columns that are kept, and how wide each is."""
    kept = list(own)
    leaving = [sheet.heads.index(head) for head in sheet.least if head in sheet.heads]
    leaving = [i for i in [*leaving, *reversed(own)] if i in own and i != own[0]]
    while True:
        most = {i: _widest(sheet, i, whole_heads=True) for i in kept}
        if _total(most) <= room:
            return kept, most
        sizes = {i: _widest(sheet, i, whole_heads=False) for i in kept}
        if _total(sizes) <= room or _shrink(sheet, sizes, room):
            return kept, sizes
        gone = next((i for i in leaving if i in kept), None)
        if gone is None:  # one column, as wide as there is room
            return kept, {i: min(size, room) for i, size in sizes.items()}
        kept.remove(gone)


def _total(sizes: dict[int, int]) -> int:
    return sum(sizes.values()) + GAP * (len(sizes) - 1)


def _widest(sheet: Sheet, column: int, *, whole_heads: bool) -> int:
    head = sheet.heads[column]
    words = [head] if whole_heads else head.split(" ")
    return max(map(len, [*words, *(row[column] for row in sheet.rows)]))


def _shrink(sheet: Sheet, sizes: dict[int, int], room: int) -> bool:
    """Takes columns of text down to what fits, the widest first; whether that was enough."""
    texts = [i for i in sizes if sheet.heads[i] not in sheet.right]
    least = {i: min(sizes[i], max(LEAST_TEXT, *map(len, sheet.heads[i].split(" ")))) for i in texts}
    while _total(sizes) > room:
        widest = max(texts, key=lambda i: sizes[i] - least[i], default=None)
        if widest is None or sizes[widest] <= least[widest]:
            return False
        sizes[widest] -= 1
    return True


def _lines(
    sheet: Sheet, row: Sequence[str], kept: Sequence[int], sizes: dict[int, int]
) -> list[str]:
    """One row; cells that are too long go on below."""
    cells = [wrap(row[i], sizes[i]) for i in kept]
    lines: list[str] = []
    for at in range(max(map(len, cells))):
        parts: list[str] = []
        for i, cell in zip(kept, cells, strict=True):
            text = cell[at] if at < len(cell) else ""
            is_number = sheet.heads[i] in sheet.right
            parts.append(text.rjust(sizes[i]) if is_number else text.ljust(sizes[i]))
        lines.append((" " * GAP).join(parts).rstrip())
    return lines
