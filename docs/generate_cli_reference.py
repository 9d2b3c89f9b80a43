"""Writes docs/cli.md from the tables that the commands parse their arguments with; a test holds the
page to it.

Usage: python docs/generate_cli_reference.py
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from napkinmath.cli.flag_rows import ON, REPEAT, SWITCH, meaning
from napkinmath.cli.flags import SHARED
from napkinmath.cli.main import COMMANDS, DEFAULT
from napkinmath.cli.parser import Parser
from napkinmath.inputs.option_table.trainers_words import ALONE, SAME

PAGE = Path(__file__).resolve().parent / "cli.md"
HEAD = """# Command line

Made by `python docs/generate_cli_reference.py` from the tables that the commands read; `estimate COMMAND --help` prints the same.

| exit code | meaning |
|---|---|
| 0 | fits, or nothing was asked to fit |
| 1 | does not fit |
| 2 | bad input: one line says what and the way out |
| 3 | cannot tell: the range straddles the capacity |
| 130 | interrupted |

| command | |
|---|---|
"""
SHARED_TITLES = {title: [row[0] for row in rows] for title, rows in SHARED}


class Reached(BaseException):
    """The command has made its parser; BaseException, so that nothing on the way takes it for an
    error."""

    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(target: str) -> Parser:
    """The parser that a command ("module:function") reads its arguments with."""

    def reached(parser: Parser, argv: object) -> Any:
        raise Reached(parser)

    module, _, function = target.partition(":")
    with patch.object(Parser, "parse", reached):
        try:
            getattr(importlib.import_module(module), function)(["--help"])
        except Reached as found:
            return found.parser
    raise RuntimeError(f"{target} parses nothing")


def page() -> str:
    """The page as Markdown."""
    parsers = {name: parser_of(target) for name, (target, _) in COMMANDS.items()}
    lines = [HEAD, "| [`estimate`](#estimate) | price one training step |\n"]
    lines += [
        f"| [`estimate {name}`](#estimate-{name}) | {meaning} |\n"
        for name, (_, meaning) in COMMANDS.items()
    ]
    lines += section("estimate", parser_of(DEFAULT))
    for name, parser in parsers.items():
        lines += section(f"estimate {name}", parser)
    lines.append("\n## Flags that commands share\n")
    for title, rows in SHARED:
        lines += [f"\n### {title[0].upper()}{title[1:]}\n", "\n", *table(rows)]
    return "".join([*lines, *trainers_words()])


def section(name: str, parser: Parser) -> list[str]:
    """A command: its usage, what it does, and the flags that are its own."""
    lines = [f"\n## {name}\n\n```text\n{parser.usage}\n```\n\n{escaped(parser.description)}\n"]
    if parser.positional is not None:
        _, metavar, meaning = parser.positional
        lines.append(f"\n`{metavar}`: {escaped(meaning)}.\n")
    shared = [
        title
        for title, rows in parser.groups
        if SHARED_TITLES.get(title) == [row[0] for row in rows]
    ]
    own = [row for title, rows in parser.groups if title not in shared for row in rows]
    if shared:
        several = any(
            row[1] == REPEAT for title, rows in parser.groups if title == "batch" for row in rows
        )
        links = ", ".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in shared)
        lines.append(f"\nShared flags{', each with several values' if several else ''}: {links}.\n")
    return lines + (["\n", *table(own)] if own else [])


def trainers_words() -> list[str]:
    """The names by which flags go in trainers, as a table."""
    lines = [
        "\n## Flags as trainers write them\n\n",
        "Read with `-` or `_`, with `true` behind a switch, and as keywords in Python.\n\n",
        "| here | in trainers |\n|---|---|\n",
    ]
    theirs = {flag: names.split() for flag, names in SAME.items()}
    for name, written in ALONE.items():
        theirs.setdefault(written, []).append(name)
    for flag, names in theirs.items():
        lines.append(f"| `{flag}` | {', '.join(f'`--{name}`' for name in names)} |\n")
    return lines


def table(rows: Any) -> list[str]:
    """Rows of flags as a table."""
    lines = ["| flag | meaning |\n|---|---|\n"]
    for row in rows:
        names, kind, metavar, _ = row
        said = meaning(row)
        value = f" {metavar}" if metavar and kind not in (ON, SWITCH) else ""
        spelled = [f"`{name}{value}`" for name in names] + (
            [f"`--no-{names[0].removeprefix('--')}`"] if kind == SWITCH else []
        )
        repeated = "; may be repeated" if kind == REPEAT and "repeated" not in said else ""
        lines.append(
            f"| {', '.join(spelled).replace('|', chr(92) + '|')} | {escaped(said)}{repeated} |\n"
        )
    return lines


def escaped(text: str) -> str:
    """Text whose brackets, stars and bars are no Markdown."""
    for character in "\\*[]|<>_":
        text = text.replace(character, "\\" + character)
    return text


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
