"""The flags that every command shares, made from the table of options."""

from __future__ import annotations

import os

from napkinmath.cli.flag_rows import DEBUG as DEBUG
from napkinmath.cli.flag_rows import ON, REPEAT, SWITCH, TEXT
from napkinmath.inputs.option_table import GROUPS
from napkinmath.inputs.option_table import option as options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.cli.flag_rows import Group, Row
    from napkinmath.cli.parser import Parser
    from napkinmath.inputs.option_table.option import Option


def _rows(option: Option) -> list[Row]:
    """The flags of an option: those that are one of its values, then its own."""
    flag = options.flag_of
    rows: list[Row] = [
        ((flag(name),), (option.key, value), "", meaning)
        for name, value, meaning in option.shorthands
    ]
    kind = {options.SWITCH: SWITCH, options.ON: ON}.get(option.kind, TEXT)
    short = (option.short,) if option.short else ()
    names = (option.flag, *short, *(flag(alias) for alias in option.aliases))
    rows.append((names, REPEAT if option.repeats else kind, option.metavar, option.meaning))
    return rows


def _export_kinds() -> str:
    from napkinmath.exports import KINDS

    return f"the configuration for another tool instead: {', '.join(KINDS)}"


OUTPUT: tuple[Row, ...] = (
    (("--json",), ON, "", "the documented JSON instead of the report"),
    (("--explain",), ON, "", "every line as formula, numbers, value and source"),
    (("--timeline",), TEXT, "FILE", "memory over one step as .html, .svg or .png"),
    (("--export",), TEXT, "KIND", _export_kinds),
    DEBUG,
)
RUN_FILES: Group = (
    "files of one run",
    (
        (
            ("--deepspeed",),
            TEXT,
            "FILE",
            "DeepSpeed's JSON beside a trainer's file or the flags; a flag says more than a file",
        ),
    ),
)


def parsed(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """Options of a command line whose words after `--` may be a launch line: 'launch'."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    line = words[at + 1 :]
    is_file = bool(line) and (
        os.path.exists(line[0]) or line[0].endswith((".yaml", ".yml", ".json", ".toml"))
    )
    if not line or is_file:
        return parser.parse(words)
    return {**parser.parse(words[:at]), "launch": line}


SHARED: tuple[Group, ...] = (
    *(
        (title, tuple(r for o in found if o.is_at(options.FLAG) for r in _rows(o)))
        for title, found in GROUPS
    ),
    ("output", OUTPUT),
)
