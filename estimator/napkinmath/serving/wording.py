"""Messages of the library, which name fields and flags, worded for the page."""

from __future__ import annotations

import re

from napkinmath.inputs.option_table import SHORTHANDS, find_option
from napkinmath.inputs.option_table.flag_words import in_flags
from napkinmath.serving.requests import KNOWN

# What the page's field of further options takes besides the names of options.
SHORT = frozenset(SHORTHANDS)
_FLAG = re.compile(r"(?<![\w'\"-])--(?:no-)?([a-z][a-z0-9-]*)")
_COMMAND = re.compile(r"`(?:estimate) [^`]+`")


def for_the_page(message: str) -> str:
    """The message in one line; a flag or command that the page lacks is said to be the command
    line's."""
    text = _COMMAND.sub(
        lambda found: f"the command line's {found[0]}", " ".join(in_flags(message).split())
    )
    return _FLAG.sub(_placed, text)


def is_on_the_page(flag: str) -> bool:
    """Whether the page takes a flag, given without its dashes."""
    option = find_option(flag)
    return flag in SHORT or (option is not None and option.key in KNOWN)


def _placed(found: re.Match[str]) -> str:
    return found[0] if is_on_the_page(found[1]) else f"the command line's {found[0]}"
