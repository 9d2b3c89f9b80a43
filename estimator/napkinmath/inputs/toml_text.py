"""TOML of a job file."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def load(text: str, path: str, *, what: str) -> object:
    """The value of a TOML text; InputError, one line, where it is broken, or where this Python
    reads no TOML."""
    try:
        tomllib: Any = __import__("tomllib")  # of Python 3.11 and later
    except ImportError:
        raise InputError(
            f"{what} {quoted(path)} is TOML, which needs Python 3.11; use that, or write it as .json"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{what} {quoted(path)} is not TOML: {error}; repair it") from None
    except RecursionError:
        raise InputError(
            f"{what} {quoted(path)} is nested too deeply; write plain keys and values"
        ) from None
