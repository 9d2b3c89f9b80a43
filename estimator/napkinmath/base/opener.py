"""An `opener` for `open`, under which a named pipe that nobody writes is empty and does not wait."""

from __future__ import annotations

import os


def without_waiting(path: str, flags: int) -> int:
    """Opens for reading; a pipe with a writer is then read as ever, as of `<(command)`."""
    opened = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(opened, True)
    return opened
