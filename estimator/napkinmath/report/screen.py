"""Lines of styled text for a terminal: widths, colours that vanish in a pipe, and ASCII where the
encoding has no more."""

from __future__ import annotations

import os
import sys

from napkinmath.report.palette import ansi

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    Part = tuple[str, str]  # text, and its style: "", "bold", "dim" or a colour '#rrggbb'

NARROWEST, WIDEST, PIPE_WIDTH = 60, 132, 100
BARS, SPARKS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(
    {
        "·": "*",
        "⌈": "ceil(",
        "⌉": ")",
        "×": "x",
        "…": "~",
        "│": "|",
        "−": "-",
        "²": "^2",
        "█": "#",
        "▏": "",
        "▎": "",
        "▍": "",
        "▌": "#",
        "▋": "#",
        "▊": "#",
        "▉": "#",
    }
    | dict(zip(SPARKS[:-1], "_.:-=+*", strict=True))
)


def terminal_width(stream: TextIO) -> int:
    """Columns to use: the terminal's, COLUMNS where set, or a fixed width in a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(NARROWEST, min(WIDEST, int(columns)))
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return PIPE_WIDTH
    return max(NARROWEST, min(WIDEST, found)) if found else PIPE_WIDTH


def wants_color(stream: TextIO) -> bool:
    """Colours on a terminal that can show them; NO_COLOR and FORCE_COLOR decide where set
    (no-color.org, force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb" or not getattr(stream, "isatty", lambda: False)():
        return False
    return os.name != "nt" or any(name in os.environ for name in ("WT_SESSION", "ANSICON", "TERM"))


def is_unicode(stream: TextIO) -> bool:
    """Whether the stream's encoding can carry bars and dots."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


class Screen:
    """Lines of parts; `text()` renders them once the whole report is laid out."""

    def __init__(self, width: int, *, color: bool, unicode: bool) -> None:
        self.width, self.color, self.unicode = width, color, unicode
        self._lines: list[list[Part]] = []

    def line(self, *parts: str | Part) -> None:
        """One line, cut at the width."""
        self._lines.append(
            cut([part if isinstance(part, tuple) else (part, "") for part in parts], self.width)
        )

    def whole(self, label: str, text: str) -> None:
        """One line that is not cut: what is to be copied."""
        self._lines.append([(label, "dim"), (text, "")])

    def flow(
        self,
        label: str,
        items: list[str],
        *,
        indent: int,
        separator: str = "   ",
        style: str = "dim",
    ) -> None:
        """A label, then items that wrap between each other (and an item longer than a line between
        its words)."""
        room = self.width - indent
        rows: list[str] = []
        for item in items:
            if rows and len(rows[-1]) + len(separator) + len(item) <= room:
                rows[-1] += separator + item
            else:
                rows += wrap(item, room)
        for number, row in enumerate(rows):
            self.line((label.ljust(indent) if number == 0 else " " * indent, style), row)

    def text(self) -> str:
        """Everything, each line ended."""
        return "".join(self._render(line) + "\n" for line in self._lines)

    def _render(self, line: list[Part]) -> str:
        parts = [
            (
                (
                    text
                    if self.unicode
                    else text.translate(_ASCII).encode("ascii", "replace").decode()
                ),
                style,
            )
            for text, style in line
        ]
        if not self.color:
            return "".join(text for text, _ in parts).rstrip()
        return "".join(_styled(text, style) for text, style in parts).rstrip()


def _styled(text: str, style: str) -> str:
    codes = ";".join({"bold": "1", "dim": "2"}.get(word) or ansi(word) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text.strip() else text


def cut(parts: list[Part], width: int) -> list[Part]:
    """The parts up to a width, with an ellipsis where something is lost."""
    if sum(len(text) for text, _ in parts) <= width:
        return parts
    kept: list[Part] = []
    for text, style in parts:
        if len(text) >= width:
            return [*kept, (text[: max(width - 1, 0)] + "…", style)]
        kept.append((text, style))
        width -= len(text)
    return kept


def cut_between_words(text: str, width: int) -> str:
    """A text up to a width, with an ellipsis in the place of the words that are lost."""
    if len(text) <= width:
        return text
    kept = text[: width - 1].rpartition(" ")[0] if " " in text[: width - 1] else text[: width - 2]
    return f"{kept} …"


def wrap(text: str, width: int) -> list[str]:
    """Text broken between words; a longer word is broken behind a hyphen, else where the line
    ends."""
    rows = [""]
    for word in text.split(" "):
        while len(word) > width:
            if rows[-1]:
                rows.append("")
            hyphen = word.rfind("-", 0, width)
            end = hyphen + 1 if word[:hyphen].strip("-") and hyphen > 0 else width
            rows[-1], word = word[:end], word[end:]
            rows.append("")
        if rows[-1] and len(rows[-1]) + 1 + len(word) > width:
            rows.append(word)
        else:
            rows[-1] = f"{rows[-1]} {word}" if rows[-1] else word
    return [row for row in rows if row] or [""]


def bar(share: float, width: int, *, unicode: bool) -> str:
    """A bar of `share` of the width, in eighths of a column; any share above 0 shows."""
    eighths = min(round(share * width * 8), width * 8)
    if not unicode:
        return "#" * max(round(share * width), 1 if share > 0 else 0)
    eighths = max(eighths, 1 if share > 0 else 0)
    return BARS[8] * (eighths // 8) + (BARS[eighths % 8] if eighths % 8 else "")


def sparkline(values: tuple[int, ...]) -> str:
    """Values as eighths of a line's height, from the least to the greatest of them."""
    low, high = min(values, default=0), max(values, default=0)
    return "".join(
        SPARKS[min((value - low) * 8 // (high - low), 7)] if high > low else SPARKS[0]
        for value in values
    )


def standard_output() -> TextIO:
    """The stream that a report goes to unless another is named."""
    return sys.stdout
