"""TOML of a job file."""

from __future__ import annotations

import sys

from napkinmath.base.errors import InputError
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def load(text: str, path: str, *, what: str) -> object:
    """The value of a TOML text; InputError, one line, where it is broken, or where Python 3.10 has
    no tomli."""
    try:
        tomllib: Any = __import__("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise InputError(
            f"{what} {quoted(path)} is TOML, which needs tomli on Python 3.10; pip install tomli, or"
            " write it as .json"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{what} {quoted(path)} is not TOML: {error}; repair it") from None
    except RecursionError:
        raise InputError(
            f"{what} {quoted(path)} is nested too deeply; write plain keys and values"
        ) from None
