"""Write a file whole or not at all, and never over one that exists unless told to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from napkinmath.base.errors import InputError, shown


def write_whole(
    path: str | os.PathLike[str], write: Callable[[BinaryIO], None], *, force: bool
) -> None:
    """Call ``write`` on a temporary neighbour of ``path`` and rename it; raises InputError for an
    existing file without ``force``."""
    name = os.fspath(path)
    said = shown(name, limit=200)
    if os.path.isdir(name):
        raise InputError(f"{said} is a folder; name a file in it")
    if os.path.lexists(name) and not force:
        raise InputError(f"{said} exists; add --force to replace it, or name another")
    folder, base = os.path.split(os.path.abspath(name))
    temporary = os.path.join(folder, f".{base[:100]}.{os.getpid()}.part")
    try:
        with open(temporary, "xb") as file:
            write(file)
        os.replace(temporary, name)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{said} cannot be written: {reason}; check the folder and the disk"
        ) from None
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
