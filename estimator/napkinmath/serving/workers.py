"""Processes that price, in lanes: a slider's move never waits behind a long answer, nor for the
interpreter lock of another move."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from threading import Lock, Semaphore, Thread

from napkinmath.base.errors import NapkinError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

MOST_QUICK = 4  # processes for moves
SECONDS_TO_PRICE = 20  # of one answer; nothing on the page takes as long
MOST_WAITING = 512  # answers asked for and not yet made, in one lane
NICENESS = 10  # of long answers, so that moves go first where processors are few
MOST_BYTES = 4 << 30  # address space of a process
MADE, REFUSED, FAILED = "made", "refused", "failed"


class Busy(NapkinError):
    """More is asked than can be answered soon."""


class TooLong(NapkinError):
    """An answer takes longer than anybody waits."""


class Gone(NapkinError):
    """Nobody waits for the answer any more."""


class Failed(Exception):
    """Our own mistake in another process, by its exception's name."""


class Lane:
    """Some processes and how many answers they owe."""

    def __init__(self, size: int, *, nice: int = 0) -> None:
        self._size, self._nice, self._lock, self._owed = size, nice, Lock(), 0
        self._turns = Semaphore(size)
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        # Not forked: other threads of this process may hold locks at that moment.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            self._size, mp_context=context, initializer=_begin, initargs=(self._nice,)
        )

    def run(
        self, make: Callable[..., bytes], *arguments: object, wanted: Callable[[], bool]
    ) -> bytes:
        """The answer, made in one of the processes when its turn has come and if it is `wanted`
        then.

        Raises Busy, Gone, Failed, or NapkinError where `make` does.
        """
        with self._lock:
            if self._owed >= MOST_WAITING:
                raise Busy("too many answers are being waited for; ask again in a moment")
            self._owed += 1
        try:
            with self._turns:
                if not wanted():
                    raise Gone("the client went away")
                outcome, content = self._submitted(make, *arguments)
        finally:
            with self._lock:
                self._owed -= 1
        if outcome == REFUSED:
            raise NapkinError(content.decode())
        if outcome == FAILED:
            raise Failed(content.decode())
        return content

    def _submitted(self, make: Callable[..., bytes], *arguments: object) -> tuple[str, bytes]:
        pool = self._pool
        try:
            return pool.submit(_made, make, *arguments).result()
        except (
            BrokenExecutor
        ) as error:  # killed from outside, for memory perhaps: the next one gets new processes
            with self._lock:
                if self._pool is pool:
                    self._pool = self._started()
            raise Busy("the process that priced this was ended; ask again") from error

    def warm(self, begin: Callable[[], bytes]) -> None:
        """Starts the processes with something to do, so that the first to ask does not wait for
        them."""
        for _ in range(self._size):
            self._pool.submit(_made, begin)

    def close(self) -> None:
        """Ends the processes; answers that nobody has begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Workers:
    """A lane for moves, one for what the page shows after them, and one for searches, each less
    urgent than the one before."""

    def __init__(self) -> None:
        self.quick = Lane(max(1, min(MOST_QUICK, os.cpu_count() or 1)))
        self.later = Lane(1, nice=NICENESS // 2)
        self.long = Lane(1, nice=NICENESS)

    def warm(self, begin: Callable[[], bytes]) -> None:
        """Starts every lane's processes."""
        for lane in (self.quick, self.later, self.long):
            lane.warm(begin)

    def close(self) -> None:
        """Ends them."""
        for lane in (self.quick, self.later, self.long):
            lane.close()


def _begin(nice: int) -> None:
    """Called in each new process: Ctrl-C is the server's, runaway answers end by themselves."""
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_server, daemon=True).start()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    if hasattr(os, "nice"):
        os.nice(nice)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _too_long)
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS,
            (MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard), hard),
        )
    except (ImportError, ValueError, OSError):  # Windows has none; others may refuse
        pass


def _end_with_the_server() -> None:
    """A server that is killed cannot end its processes: each waits for that itself."""
    from multiprocessing.connection import wait

    server = multiprocessing.parent_process()
    if server is not None:
        wait([server.sentinel])
        os._exit(1)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TooLong(
        f"this takes longer than {SECONDS_TO_PRICE} s; ask for less, or use the command line"
    )


def _made(make: Callable[..., bytes], *arguments: object) -> tuple[str, bytes]:
    """(how it went, the answer or the reason): exceptions are not sent, since not every one
    survives being pickled."""
    timed = hasattr(signal, "setitimer")
    if timed:
        signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_PRICE)
    try:
        return MADE, make(*arguments)
    except NapkinError as error:
        return REFUSED, str(error).encode()
    except MemoryError:
        return REFUSED, b"this takes more memory than an answer may have; ask for less"
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}".encode()
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
