"""Flags of `estimate watch`, apart from what runs it: its help needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from napkinmath.cli.flag_rows import TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser

from napkinmath_profiler.measuring.watch_defaults import DEFAULT_REPORT

USAGE = "estimate watch [flags] SCRIPT.py [ARGS ...]"
OWN = (
    (
        ("--device",),
        TEXT,
        "NAME",
        "cuda, cuda:N, or cpu: the books a GPU's allocator would keep [cuda where there is one]",
    ),
    (("--report",), TEXT, "FILE", f"what to write if memory runs out [{DEFAULT_REPORT}]"),
    (("--limit",), TEXT, "SIZE", "memory to warn against and, on a CPU, to run out of [the GPU's]"),
)
DESCRIPTION = (
    "Run SCRIPT.py (or -m MODULE) with its ARGS in this process and follow its training: peaks by"
    " phase and step, warnings of drift before memory runs out, a report if it does. The flags"
    " before SCRIPT.py describe the step as for `estimate`; with a model, what was predicted stands"
    " beside."
)


def parser() -> Parser:
    """Every flag of the command that stands before the script."""
    return Parser("estimate watch", DESCRIPTION, (*SHARED, ("watch", OWN)), usage=USAGE)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags, and the script with its arguments: what begins at the first word ending in .py, at
    -m after which a module comes, or after --."""
    for index, word in enumerate(argv):
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if word.endswith(".py") or (
            word == "-m" and index + 1 < len(argv) and _is_module(argv[index + 1])
        ):
            return list(argv[:index]), list(argv[index:])
    return list(argv), []


def _is_module(name: str) -> bool:
    """-m is also the short --model; a dotted name that can be imported is a module."""
    try:
        return all(part.isidentifier() for part in name.split(".")) and find_spec(name) is not None
    except (ImportError, ValueError):
        return False
