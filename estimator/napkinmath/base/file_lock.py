"""try_lock: a lock on an open file that the system drops when its process ends, however it ends."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_FAR = 1 << 40  # Windows locks bytes: one past what any run writes


def try_lock(file: BinaryIO) -> bool:
    """Locks `file` until it is closed; False where another run holds the lock. Never waits.

    Raises OSError where the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_FAR)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
