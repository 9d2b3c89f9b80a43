"""Rows of flags, as cli/parser.py reads them.

A row is (flags, kind, metavar, help); its first flag gives the option's key. A kind is TEXT (one
value), REPEAT (a value each time), ON (no value), SWITCH (--flag and --no-flag), or (key, value): a
flag that is one value of another option. A help that names what a catalog has is a function, called
where the help is printed.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Row: TypeAlias = tuple[tuple[str, ...], str | tuple[str, str], str, str | Callable[[], str]]
    Group: TypeAlias = tuple[str, tuple[Row, ...]]

TEXT, REPEAT, ON, SWITCH = "text", "repeat", "on", "switch"
DEBUG: Row = (("--debug",), ON, "", "show a traceback where something fails")


def meaning(row: Row) -> str:
    """What a flag is, in words."""
    return row[3] if isinstance(row[3], str) else row[3]()
