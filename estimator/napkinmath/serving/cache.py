"""Answers by what was asked: the latest are kept, and what several ask for at once is made once."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from hashlib import sha256
from threading import Lock

from napkinmath.serving.workers import Gone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_BYTES = 32 << 20
ENTRY_BYTES = 512  # of a digest, its place and the headers of both objects


class Cache:
    """Keeps answers up to so many bytes, the least recently asked for going first.

    Keys are kept as digests: a question may be a thousand times as long as its answer.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._most, self._lock, self._held = kept_bytes, Lock(), 0
        self._kept = OrderedDict[bytes, bytes]()
        self._coming: dict[bytes, Future[bytes]] = {}

    def get(self, asked: object, make: Callable[[], bytes]) -> bytes:
        """The kept answer to what was `asked` (known by its repr), the one that somebody else
        is waiting for, or a new one; raises what `make` raises."""
        key = sha256(repr(asked).encode()).digest()
        while True:
            with self._lock:
                found = self._kept.get(key)
                if found is not None:
                    self._kept.move_to_end(key)
                    return found
                coming = self._coming.get(key)
                if coming is None:
                    mine = self._coming[key] = Future()
                    break
            try:
                return coming.result()
            except Gone:  # whoever asked first went away, and this one has not
                continue
        self._make(key, make, mine)
        return mine.result()

    def _make(self, key: bytes, make: Callable[[], bytes], coming: Future[bytes]) -> None:
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            coming.set_exception(error)
            return
        with self._lock:
            del self._coming[key]
            self._kept[key] = made
            self._held += len(made) + ENTRY_BYTES
            while self._held > self._most and len(self._kept) > 1:
                self._held -= len(self._kept.popitem(last=False)[1]) + ENTRY_BYTES
        coming.set_result(made)
