"""Runs the command line inside the test process."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from napkinmath.cli.main import main

TINY = ("--arch", "L2 h64 a4 kv2 f128 v256", "--ctx", "64")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run(*argv: str) -> Done:
    """Exit code, standard output and standard error of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return Done(code, out.getvalue(), err.getvalue())
