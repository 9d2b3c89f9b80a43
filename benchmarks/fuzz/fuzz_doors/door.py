"""A door: its name, what makes an input from a generator of random numbers, and what calls it.

Every input is a command line with files. "@name" in the command line is the path of a file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from napkinmath.base.errors import NapkinError
from napkinmath.cli import estimate_command
from napkinmath.cli.main import DEFECT, main
from napkinmath.report import json_report

STANDARD_INPUT = "stdin"  # a file of this name is what the command reads from standard input
SECONDS_A_PROCESS = 120
_SECONDS_BETWEEN_LOOKS = 0.01
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Case(NamedTuple):
    """One input."""

    argv: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...] = ()


class Done(NamedTuple):
    """What came of it; `defect` names an exception and where it was raised, if there was one."""

    code: int
    out: str
    err: str
    defect: str = ""


Call = Callable[[Case, Path], Done]


def prepared(case: Case, folder: Path) -> list[str]:
    """Writes the files and returns the command line with their paths."""
    for name, content in case.files:
        (folder / name).write_bytes(content)
    return [str(folder / word[1:]) if word.startswith("@") else word for word in case.argv]


def command(case: Case, folder: Path) -> Done:
    """Runs the command line in this process."""
    argv = prepared(case, folder)
    done = _main(argv, case)
    if done.code != DEFECT:
        return done
    return done._replace(defect=_place([*argv, "--debug"], case) or done.err.strip())


def figures(case: Case, folder: Path) -> Done:
    """What `estimate --json` prints without its comparisons with other configurations and GPUs."""
    try:
        options = estimate_command._parser().parse(prepared(case, folder))
        found = [json_report.figures(e) for e in estimate_command.make_estimates(options, [])]
    except NapkinError as error:
        return Done(error.exit_code, "", f"estimate: {' '.join(str(error).split())}\n")
    except Exception as error:
        return Done(DEFECT, "", "", signature(error))
    return Done(0, json.dumps(found), "")


class Process(NamedTuple):
    """A command line that ran as a process of its own: what it printed, its processor seconds and
    its highest resident bytes."""

    done: Done
    seconds: float
    nbytes: int


def process(case: Case, folder: Path) -> Process:
    """Runs the command line as a process of its own."""
    argv = prepared(case, folder)
    paths = tuple(folder / f".{name}" for name in ("stdin", "stdout", "stderr"))
    paths[0].write_bytes(dict(case.files).get(STANDARD_INPUT, b""))
    with paths[0].open("rb") as given, paths[1].open("wb") as out, paths[2].open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "napkinmath", *argv],
            stdin=given,
            stdout=out,
            stderr=err,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        code, used = _ended(child)
    found = Done(code, *(path.read_bytes().decode("utf-8", "replace") for path in paths[1:]))
    if code == DEFECT or code < 0 or "Traceback" in found.err:
        last = found.err.strip().splitlines()[-1:] or [""]
        found = found._replace(defect=f"process: exit {code}: {last[0][:200]}")
    return Process(found, used.ru_utime + used.ru_stime, used.ru_maxrss * _MAXRSS_UNIT)


def _ended(child: subprocess.Popen[bytes]) -> tuple[int, resource.struct_rusage]:
    """The exit code of a process and what it used; a process that hangs is killed."""
    end = time.monotonic() + SECONDS_A_PROCESS
    pid, status, used = os.wait4(child.pid, os.WNOHANG)
    while not pid:
        if time.monotonic() > end:
            child.kill()
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, used


def signature(error: BaseException) -> str:
    """The exception's type, and the innermost function of ours that was running."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "napkinmath" in Path(frame.filename).parts or "napkinmath_profiler" in frame.filename
    ]
    where = f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else "outside"
    return f"{type(error).__name__} in {where}"


def _main(argv: list[str], case: Case) -> Done:
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(dict(case.files).get(STANDARD_INPUT, b"").decode("utf-8", "replace"))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


def _place(argv: list[str], case: Case) -> str:
    """Where the same command line fails when it may raise; empty if it does not fail again."""
    try:
        _main(argv, case)
    except Exception as error:
        return signature(error)
    return ""


class Door(NamedTuple):
    """Where input comes in. A whole process can stand for `call` where the input is a command."""

    name: str
    make: Callable[[Random], Case]
    call: Call = command
    is_command: bool = True
    seconds: float = 5.0
    """Processor seconds that one input may take."""
