"""One input tried: the door is called, and what comes is held to what must be true."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

from napkinmath.cli.main import DEFECT

from fuzz_doors import checks
from fuzz_doors.door import Call, Case, Done, Door, command, figures, process

EVERY_PROCESS, EVERY_REACH, EVERY_SCHEMA = 250, 200, 20
EVERY_ADVICE = 4  # of reports as JSON: the others leave out the comparisons, half of the time
MOST_SECONDS = 60  # processor seconds after which an input is stopped
MOST_BYTES = 6 << 30  # address space
MOST_RESIDENT = 10**9  # bytes of a process of its own


class Stopped(BaseException):
    """An input took too long; no Exception, so that nothing on the way handles it."""


class Trial(NamedTuple):
    """One input's outcome: whether it was refused, the defect's name if there was one, processor
    seconds, and the highest resident bytes."""

    refused: bool
    defect: str
    seconds: float
    nbytes: int


def case_of(door: Door, seed: int, number: int) -> Case:
    """The input of a door with this number: the same for ever."""
    return door.make(Random(f"{seed} {door.name} {number}"))


def tried(
    door: Door, case: Case, number: int = EVERY_ADVICE, *, seconds: float | None = None
) -> Trial:
    """Calls the door; by its number an input runs as a process of its own, is held against the
    schema or has its limits priced anew. `seconds` of the processor are allowed, by default the
    door's."""
    if door.is_command and number % EVERY_PROCESS == 0:
        return tried_whole(door, case, number)
    allowed = door.seconds if seconds is None else seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _reset_peak()
        began = time.process_time()
        brief = door.call is command and "--json" in case.argv and number % EVERY_ADVICE
        call = figures if brief else door.call
        done = _called(call, case, folder)
        spent, nbytes = time.process_time() - began, _peak()
        wrong = checks.untidy(done)
        if not wrong and done.code != 2:
            wrong = checks.wrong_figures(done, by_schema=number % EVERY_SCHEMA == 0)
        if not wrong and spent > allowed:
            wrong = f"more than {allowed:g} s"
        if not wrong and done.code != 2 and number % EVERY_REACH == 0:
            wrong = _reaches(door, case, folder)
    return Trial(done.code == 2, wrong, spent, nbytes)


def tried_whole(door: Door, case: Case, number: int) -> Trial:
    """Runs the input as a process of its own, start-up and the advice of the report included."""
    with tempfile.TemporaryDirectory() as name:
        done, spent, nbytes = process(case, Path(name))
    wrong = checks.untidy(done)
    if not wrong and done.code != 2:
        wrong = checks.wrong_figures(done, by_schema=number % EVERY_SCHEMA == 0)
    if not wrong and spent > door.seconds:
        wrong = f"more than {door.seconds:g} s"
    # Linux counts a child's peak from that of the process that started it (fs/exec.c exec_mmap)
    if not wrong and nbytes > max(MOST_RESIDENT, _peak()):
        wrong = "more than 1 GB"
    return Trial(done.code == 2, wrong, spent, nbytes)


def limit_process() -> None:
    """For a process of nothing but trials: bounds the memory and each input's processor time, and
    keeps it from this user's files and the network."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGPROF, _stop)
    folder = tempfile.mkdtemp()
    os.environ.update(XDG_CACHE_HOME=folder, HOME=folder, HF_ENDPOINT="http://127.0.0.1:9")
    os.chdir(folder)


def _called(call: Call, case: Case, folder: Path) -> Done:
    is_timed = signal.getsignal(signal.SIGPROF) is _stop
    try:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS if is_timed else 0)
        return call(case, folder)
    except Stopped:
        return Done(DEFECT, "", "", f"more than {MOST_SECONDS} s")
    except Exception as error:
        return Done(DEFECT, "", "", f"outside main: {type(error).__name__}: {error}"[:200])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _reaches(door: Door, case: Case, folder: Path) -> str:
    """What is wrong with the limits of an estimate, on a GPU where it named none."""
    if door.call is not command or not case.argv[0].startswith(("-", "@")):
        return ""
    words = case.argv if "--gpu" in case.argv else (*case.argv, "--gpu", "4090")
    return checks.wrong_reaches(case._replace(argv=words), folder)


def _stop(*_: object) -> None:
    raise Stopped


def _reset_peak() -> None:
    """Forgets the highest resident bytes of inputs before (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    with suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
