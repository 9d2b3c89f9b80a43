"""`estimate batch FILE.jsonl --out OUT.jsonl`: a job a line, an answer a line, in constant memory;
goes on where it was killed."""

from __future__ import annotations

import sys
import time

from napkinmath.base.errors import InputError, plain
from napkinmath.base.progress import NOW
from napkinmath.cli.flag_rows import DEBUG, ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.cli.flag_rows import Row

_OUTPUT: tuple[Row, ...] = (
    (
        ("--out", "-o"),
        TEXT,
        "OUT.jsonl",
        "where the answers go; bad lines go to OUT.jsonl.bad.jsonl",
    ),
    (
        ("--exact",),
        ON,
        "",
        "replay the allocator for every job: all figures, some fifty jobs a second",
    ),
    (("--force",), ON, "", "start again where an output is there"),
    DEBUG,
)
_DESCRIPTION = (
    'Price a file of jobs, one JSON object a line with the keys of a job file: {"model":'
    ' "llama-7b", "method": "lora", "bs": 4}. Flags hold where a line says nothing. A key "id"'
    " comes back with the answer. Killed at any moment, the same command goes on."
)
MOST_NOTES = 10


def run(argv: Sequence[str]) -> int:
    """Prices the file; returns 0 where every line was understood, else 2."""
    groups = (*((name, rows) for name, rows in SHARED if name != "output"), ("output", _OUTPUT))
    parser = Parser(
        "estimate batch", _DESCRIPTION, groups, positional=("file", "FILE.jsonl", "the jobs")
    )
    options = parser.parse(argv)
    source, out = options.pop("file", None), options.pop("out", None)
    if not isinstance(source, str) or not isinstance(out, str):
        raise InputError(
            "batch needs a file of jobs and --out; write estimate batch jobs.jsonl --out"
            " answers.jsonl"
        )
    exact, force = options.pop("exact", None) is not None, options.pop("force", None) is not None
    options.pop("debug", None)
    from napkinmath.planning.batch import run_batch

    _collect_seldom()
    progress = _Progress(source)
    result = run_batch(source, out, options, exact=exact, force=force, progress=progress)
    NOW.say("")
    for note in list(dict.fromkeys(result.notes))[:MOST_NOTES]:
        print(f"note: {plain(note)}", file=sys.stderr)
    went_on = f" (went on after line {result.taken_over:,})" if result.taken_over else ""
    print(
        f"{result.priced:,} job{'' if result.priced == 1 else 's'} priced into {out}{went_on},"
        f" {progress.rate(result.priced):,.0f} a second"
    )
    if result.bad:
        print(
            f"{result.bad:,} bad line{'' if result.bad == 1 else 's'}, each with its reason, in"
            f" {out}.bad.jsonl",
            file=sys.stderr,
        )
    return 2 if result.bad else 0


def _collect_seldom() -> None:
    """Answers hold no cycles, and there are many of them: the collector would look at them again
    and again."""
    import gc

    gc.freeze()
    gc.set_threshold(500_000, 20, 100)


class _Progress:
    """Tells who looks on how many lines are done, of how many there should be; keeps the rate."""

    def __init__(self, source: str) -> None:
        import os

        self._total = max(os.path.getsize(source), 1)
        self._start = time.perf_counter()

    def __call__(self, read: int, lines: int) -> None:
        NOW.say("lines", lines, max(lines, round(lines * self._total / max(read, 1))))

    def rate(self, jobs: int) -> float:
        """Jobs a second since the start."""
        return jobs / max(time.perf_counter() - self._start, 1e-9)
