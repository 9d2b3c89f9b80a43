"""Tables of the catalogs: aligned columns in a terminal, tab-separated where the output is read by
a program."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def print_rows(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Prints rows under their heads; columns named in `right` are aligned to the right."""
    if sys.stdout.isatty():
        _print_table(heads, rows, right)
        return
    print("\t".join(heads))
    for row in rows:
        print("\t".join(row))


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    """Columns as wide as their widest cell; a line that is wider than the terminal loses its
    end."""
    import shutil

    width = shutil.get_terminal_size().columns
    sizes = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for row in (heads, *rows):
        cells = [
            cell.rjust(size) if head in right else cell.ljust(size)
            for head, cell, size in zip(heads, row, sizes, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        print(line if len(line) <= width else line[: width - 3] + "...")


def words_of(options: Mapping[str, object]) -> list[str]:
    """The words that filter a list."""
    words = options.get("words", [])
    return [str(word) for word in words] if isinstance(words, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def matches(words: Sequence[str], *texts: str) -> bool:
    """Whether every word occurs in one of the texts, case and punctuation aside."""
    haystack = " ".join(_plain(text) for text in texts)
    return all(_plain(word) in haystack for word in words)


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())
