"""Which release of a library a job file, or what lies beside it, pins."""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_FILES = ("requirements.txt", "environment.yml", "pyproject.toml", "setup.py", "Dockerfile")
_ABOVE = 5
"""Folders that are looked into, from the file's own up to the repository's."""
_MOST = 1 << 16  # characters of a file that says what is installed


def pinned_in(text: str, library: str) -> str:
    """The version of the first pin of a library in a text; '' without."""
    found = _pin(library).search(text)
    return found[1] if found else ""


def _pin(library: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){library}(?:\[[\w,-]*\])? ?== ?(\d+\.\d+)")


def pinned(job: ForeignJob, library: str) -> tuple[str, str]:
    """(file, version) of the first pin of a library, in the file's own text, beside it or the code that
    it starts, or in a folder above one of them in the same repository; two empty words without."""
    pin = _pin(library)
    if found := pin.search(job.text):
        return os.path.basename(job.path), found[1]
    if job.code and (found := _found_in(job.code, pin)) is not None:
        return os.path.basename(job.code), found[1]
    above = (found for path in (job.path, job.code) if (found := _pinned_above(path, pin)))
    return next(above, ("", ""))


def _pinned_above(path: str, pin: re.Pattern[str]) -> tuple[str, str] | None:
    folder = os.path.dirname(os.path.abspath(path))
    for _ in range(_ABOVE if os.path.isfile(path) else 0):
        for name in _FILES:
            if (found := _found_in(os.path.join(folder, name), pin)) is not None:
                return name, found[1]
        above = os.path.dirname(folder)
        if above == folder or os.path.exists(os.path.join(folder, ".git")):
            break
        folder = above
    return None


def _found_in(path: str, pin: re.Pattern[str]) -> re.Match[str] | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return pin.search(file.read(_MOST))
    except OSError:
        return None


def is_pinned_before(job: ForeignJob, library: str, first: tuple[int, int]) -> bool:
    """Whether a library is pinned to a release before `first`."""
    version = pinned(job, library)[1]
    return bool(version) and tuple(map(int, version.split("."))) < first
