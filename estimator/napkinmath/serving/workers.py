"""Processes that price, in lanes: a slider's move never waits behind a long answer, nor for the
interpreter lock of another move."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from threading import BoundedSemaphore, Lock, Semaphore, Thread

from napkinmath.base.errors import NapkinError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

MOST_QUICK = 4  # processes for moves
SECONDS_TO_MOVE, SECONDS_TO_SEARCH = 4, 8  # of a processor, for one answer
SLOWDOWN = 2  # times as long by the clock, since processors are shared; then the process is ended
SECONDS_TO_WAIT = 4  # for a move's turn; more is refused at once
SECONDS_TO_WAIT_LATER = 8  # for the turn of anything else
MOST_WAITING = 512  # answers asked for and not yet made, in one lane
PLANS_WAITING = 1  # a plan takes as long as a person waits: only the next one is sure of its turn
SECONDS_AT_FIRST = 0.03  # of an answer, before any was made
SECONDS_TO_START = 30  # of a new process, with its imports
WEIGHT = 0.1  # of the latest answer in the mean
NICENESS = 10  # of long answers, so that moves go first where processors are few
MOST_BYTES = 4 << 30  # address space of a process
MADE, REFUSED, FAILED = "made", "refused", "failed"


class Busy(NapkinError):
    """More is asked than can be answered soon."""

    seconds = 1  # after which to ask again


class TooLong(NapkinError):
    """An answer takes longer than anybody waits."""


class Gone(NapkinError):
    """Nobody waits for the answer any more."""


class Failed(Exception):
    """Our own mistake in another process, by its exception's name."""


class Lane:
    """Some processes, how many answers they owe and how long an answer takes them."""

    def __init__(
        self,
        size: int,
        *,
        nice: int = 0,
        seconds: float = SECONDS_TO_MOVE,
        wait: float = SECONDS_TO_WAIT,
    ) -> None:
        self._size, self._nice, self._seconds, self._wait = size, nice, seconds, wait
        self._lock, self._owed, self._mean = Lock(), 0, SECONDS_AT_FIRST
        self._turns = Semaphore(size)
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        # Not forked: other threads of this process may hold locks at that moment.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            self._size, mp_context=context, initializer=_begin, initargs=(self._nice,)
        )

    def run(
        self,
        make: Callable[..., bytes],
        *arguments: object,
        wanted: Callable[[], bool],
        wait: float | None = None,
    ) -> bytes:
        """The answer, made in one of the processes when its turn has come and if it is `wanted`
        then; for the turn it may `wait` so many seconds, by default the lane's.

        Raises Busy where the turn would not come soon, Gone, TooLong, Failed, or NapkinError where
        `make` does.
        """
        self._enter()
        try:
            outcome, content = self._in_turn(make, arguments, wanted, wait or self._wait)
        finally:
            with self._lock:
                self._owed -= 1
        if outcome == REFUSED:
            raise NapkinError(content.decode())
        if outcome == FAILED:
            raise Failed(content.decode())
        return content

    def _enter(self) -> None:
        """One answer more is owed, unless those owed already take too long."""
        with self._lock:
            ahead = max(0, self._owed - self._size + 1) * self._mean / self._size
            if self._owed >= MOST_WAITING or ahead > self._wait:
                raise Busy("too many answers are being waited for; ask again in a moment")
            self._owed += 1

    def _in_turn(
        self,
        make: Callable[..., bytes],
        arguments: tuple[object, ...],
        wanted: Callable[[], bool],
        wait: float,
    ) -> tuple[str, bytes]:
        if not self._turns.acquire(timeout=wait):
            raise Busy("answers take long at the moment; ask again in a while")
        try:
            if not wanted():
                raise Gone("the client went away")
            begun = time.monotonic()
            try:
                return self._submitted(make, *arguments)
            finally:
                with self._lock:
                    self._mean += WEIGHT * (time.monotonic() - begun - self._mean)
        finally:
            self._turns.release()

    def _submitted(self, make: Callable[..., bytes], *arguments: object) -> tuple[str, bytes]:
        pool = self._pool
        try:
            made = pool.submit(_made, self._seconds, make, *arguments)
            return made.result(SLOWDOWN * self._seconds)
        except NotInTime:
            self._replace(pool)
            raise _too_long(self._seconds) from None
        except (
            BrokenExecutor
        ) as error:  # killed from outside, for memory perhaps: the next one gets new processes
            self._replace(pool)
            raise Busy("the process that priced this was ended; ask again") from error

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        """New processes for those of a pool, which are ended if they still run."""
        with self._lock:
            if self._pool is not pool:
                return
            self._pool = self._started()
        _end(pool)
        pool.shutdown(wait=False, cancel_futures=True)

    def warm(self, begin: Callable[[], bytes]) -> None:
        """Starts the processes with something to do, so that the first to ask does not wait for
        them."""
        for _ in range(self._size):
            self._pool.submit(_made, SECONDS_TO_START, begin)

    def close(self) -> None:
        """Ends the processes at once: nobody is left to wait for what they make."""
        _end(self._pool)
        self._pool.shutdown(wait=True, cancel_futures=True)


class Few:
    """A lane for answers of which so few may be owed that nobody waits in order to be refused."""

    def __init__(self, lane: Lane, most: int) -> None:
        self._lane, self._room = lane, BoundedSemaphore(most)

    def run(
        self, make: Callable[..., bytes], *arguments: object, wanted: Callable[[], bool]
    ) -> bytes:
        """The lane's answer; raises Busy at once where too many are owed."""
        if not self._room.acquire(blocking=False):
            raise Busy("other plans are being searched; ask again in a while")
        try:
            longest = SLOWDOWN * SECONDS_TO_SEARCH  # of the one before: then it is ended
            return self._lane.run(make, *arguments, wanted=wanted, wait=longest)
        finally:
            self._room.release()


class Workers:
    """A lane for moves, one for what the page shows after them, and one for searches, each less
    urgent than the one before."""

    def __init__(self) -> None:
        self.quick = Lane(max(1, min(MOST_QUICK, os.cpu_count() or 1)))
        self.later = Lane(1, nice=NICENESS // 2, wait=SECONDS_TO_WAIT_LATER)
        self.long = Lane(1, nice=NICENESS, seconds=SECONDS_TO_SEARCH, wait=SECONDS_TO_WAIT_LATER)
        self.plans = Few(self.long, 1 + PLANS_WAITING)

    def warm(self, begin: Callable[[], bytes]) -> None:
        """Starts every lane's processes."""
        for lane in (self.quick, self.later, self.long):
            lane.warm(begin)

    def close(self) -> None:
        """Ends them."""
        for lane in (self.quick, self.later, self.long):
            lane.close()


def _end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):  # pyright: ignore[reportPrivateUsage]
        process.kill()


def _begin(nice: int) -> None:
    """Called in each new process: Ctrl-C is the server's, runaway answers end by themselves."""
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_server, daemon=True).start()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    if hasattr(os, "nice"):
        os.nice(nice)
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, _out_of_time)
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


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    raise _too_long(_allowed)


def _too_long(seconds: float) -> TooLong:
    return TooLong(f"this takes longer than {seconds:g} s; ask for less, or use the command line")


_allowed: float = SECONDS_TO_MOVE  # what the answer in the making may take; one at a time


def _made(seconds: float, make: Callable[..., bytes], *arguments: object) -> tuple[str, bytes]:
    """(how it went, the answer or the reason) after so many seconds of a processor at most:
    exceptions are not sent, since not every one survives being pickled."""
    global _allowed
    _allowed = seconds
    timed = hasattr(signal, "setitimer")
    if timed:
        signal.setitimer(signal.ITIMER_PROF, seconds)
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
            signal.setitimer(signal.ITIMER_PROF, 0)
