"""Writes docs/estimate.1, the manual page, from the tables that the commands parse their arguments
with; the wheel installs it, and a test holds the page to the tables.

Usage: python docs/generate_man.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from generate_cli_reference import parser_of
from napkinmath import __version__
from napkinmath.cli.flag_rows import meaning
from napkinmath.cli.main import COMMANDS, DEFAULT

PAGE = Path(__file__).resolve().parent / "estimate.1"
CODES = (
    ("0", "fits, or nothing was asked to fit"),
    ("1", "does not fit"),
    ("2", "bad input: one line says what, and the way out"),
    ("3", "cannot tell: the range straddles the capacity"),
    ("130", "interrupted"),
)


def escaped(text: str) -> str:
    """Text for roff: no control characters at the start of a line, hyphens as they are typed."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in plain.split("\n"))


def page() -> str:
    """The manual page."""
    lines = [
        f'.TH ESTIMATE 1 "" "napkinmath {__version__}" "User Commands"',
        ".SH NAME",
        "estimate \\- memory and time of one training step of a language model",
        ".SH SYNOPSIS",
        ".B estimate",
        "[\\fIMODEL\\fR | \\fIJOB FILE\\fR] [\\fIFLAGS\\fR]",
        ".br",
        ".B estimate",
        "\\fICOMMAND\\fR [\\fIARGUMENTS\\fR]",
        ".SH COMMANDS",
    ]
    for name, (_, what) in COMMANDS.items():
        lines += [".TP", f".B {escaped(name)}", escaped(what)]
    lines.append(".SH OPTIONS")
    for title, rows in parser_of(DEFAULT).groups:
        lines.append(f".SS {escaped(title)}")
        for row in rows:
            names, _, metavar = row[:3]
            head = f".B {escaped(', '.join(names))}"
            lines += [".TP", f"{head} {escaped(metavar)}".rstrip(), escaped(meaning(row))]
    lines.append(".SH EXIT STATUS")
    for code, what in CODES:
        lines += [".TP", f".B {code}", escaped(what)]
    lines += [".SH SEE ALSO", "`estimate COMMAND \\-\\-help` has the flags of each command."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
