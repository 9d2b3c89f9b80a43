"""write_whole: the one way in which this program writes a file, whole or not at all.

The bytes go to a temporary neighbour, to the disk, and then in the file's place. Whatever ends the
writing, the old file or the new one stands there, and no temporary file is left. A killed process
leaves one; the next writing of the same file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from napkinmath.base.errors import InputError, shown
from napkinmath.base.file_lock import try_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import BinaryIO

    Content = bytes | str | Callable[[BinaryIO], object]

PARTIAL = ".part"
FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_PATH = 200  # characters that a message shows
_OTHER_PLACE = "its folder cannot be written; name a file in another one"
_REASONS = {
    errno.ENOSPC: "the disk is full; free some space, or name a file on another one",
    errno.EDQUOT: "the disk quota is used up; free some space, or name a file elsewhere",
    errno.EACCES: _OTHER_PLACE,
    errno.EPERM: _OTHER_PLACE,
    errno.EROFS: _OTHER_PLACE,
    errno.ENOENT: "its folder does not exist; make it, or name a file in one that does",
    errno.ENOTDIR: "its folder is a file; name a file in a folder",
    errno.ENAMETOOLONG: "its name is too long; name a shorter one",
}


class NotWritten(InputError):
    """A file that the disk refused, with the number of its error."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.errno = number


def write_whole(
    path: str | os.PathLike[str], content: Content, *, force: bool = False, what: str = "file"
) -> None:
    """Writes bytes, text in UTF-8, or what a function writes into the binary file that it is given.

    Raises InputError for a file that is there without `force` and for what is no regular file,
    NotWritten where the disk refuses; what was at `path` is then still there.
    """
    name = os.fspath(path)
    refuse_existing(name, force, what=what)
    with refusals_named(name, what=what):
        target = os.path.realpath(name)  # a link stays one
        temporary = _name_beside(target)
        try:
            _fill(temporary, content)
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            refuse_existing(name, force, what=what)  # it may have come while this was written
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def refuse_existing(path: str, force: bool, *, what: str = "file") -> None:
    """Raises InputError for a file that is there, without `force`, and for what is no file."""
    said = f"{what} {shown(path, limit=_LONGEST_PATH)}"
    if not _is_path(path):
        raise InputError(f"{said} is no path; name a file without special characters")
    if os.path.isdir(path):
        raise InputError(f"{said} is a folder; name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{said} is not a regular file; name another")
    if os.path.lexists(path) and not force:
        raise InputError(f"{said} exists; add --force to replace it, or name another file")


@contextlib.contextmanager
def refusals_named(path: str, *, what: str = "file") -> Generator[None]:
    """Turns what the disk refuses into a NotWritten that names the file and the way out."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or (
            f"{error.strerror or error}; check the folder and the disk"
        )
        said = f"{what} {shown(path, limit=_LONGEST_PATH)} cannot be written: {reason}"
        raise NotWritten(said, error.errno) from error


def append_whole(file: BinaryIO, data: bytes) -> None:
    """Appends all of `data` to a binary file that is open for writing, or nothing of it.

    Raises what the disk raises; the file then ends where it ended before.
    """
    end = file.seek(0, os.SEEK_END)
    handle = file.fileno()
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except BaseException:
        os.ftruncate(handle, end)
        raise


def _fill(temporary: str, content: Content) -> None:
    """Writes the temporary file and sends it to the disk; it is locked as long as it is open."""
    with open(temporary, "xb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            try_lock(file)
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _name_beside(target: str) -> str:
    """A new name in the same folder; what killed processes left under such names is removed."""
    folder, base = os.path.split(target)
    start = f".{base[:40]}."
    with contextlib.suppress(OSError):
        for left in os.listdir(folder):
            if left.startswith(start) and left.endswith(PARTIAL):
                _remove_dead(os.path.join(folder, left))
    return os.path.join(folder, f"{start}{os.urandom(4).hex()}{PARTIAL}")


def _remove_dead(left: str) -> None:
    """Removes a temporary file unless its process still writes it."""
    with contextlib.suppress(OSError), open(left, "r+b") as file:
        if try_lock(file):
            os.unlink(left)


def _is_path(path: str) -> bool:
    try:
        return bool(path) and b"\0" not in os.fsencode(path)
    except ValueError:  # a lone surrogate
        return False
