"""Command lines of `check`, `sweep`, `plan` and `generate`, whose model may stand without a flag."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from napkinmath.catalog.cache_formats import FORMATS as CACHE_FORMATS
from napkinmath.catalog.engines import ENGINES, SERVED_FORMATS
from napkinmath.catalog.models import load_rows
from napkinmath.cli import generate
from napkinmath.cli.flag_rows import REPEAT, TEXT

from fuzz_doors import flags
from fuzz_doors.door import Case, Done, Door, command
from fuzz_doors.draw import GPUS, MODELS, TINY_ARCH, argument, often

if TYPE_CHECKING:
    from napkinmath.cli.flag_rows import Row

_SECONDS = 20.0  # a plan prices some hundred configurations
_STORED = ("deepseek-r1", "kimi-k2", "minimax-m2", "gpt-oss-20b", "gpt-oss-120b")
_FEW = ("1", "2", "8", "1,2", "1,2,4", "2-4")  # of a sweep
_GENERATE = {
    "--engine": tuple(ENGINES),
    "--quant": (*SERVED_FORMATS, "none"),
    "--cache-format": tuple(CACHE_FORMATS),
    "--dtype": ("bf16", "fp16", "fp32"),
    "--draft": ("3:0.7", "1:1", "0:0.5"),
    "--gpus": ("8xH200", "1xH100", "4xA100-80"),
    "--gpu": GPUS,
    "--memory-share": ("0.5", "0.9", "1"),
    "--token-time": ("50ms", "1s", "20us"),
    **dict.fromkeys(("--prompt", "--completion", "--ctx"), ("1", "64", "1k", "8k")),
}
_LEFT_OUT = ("--hub", "--model", "--explain", "--json", "--debug", "--config")


def make(rng: Random) -> Case:
    """A command, a model with its flag or without, a GPU mostly, and some flags."""
    name = rng.choices(("check", "sweep", "plan", "generate"), (3, 2, 1, 3))[0]
    if name == "generate":
        return Case((name, *_named(rng, (*MODELS, *_STORED)), *_generated(rng), *_form(rng)))
    tiny = name == "plan" or rng.random() < 0.6
    of = TINY_ARCH[:2] if tiny else _named(rng, MODELS)
    machine = often(rng, 0.85, "--gpu", rng.choice(GPUS)) or ("--gpus", "4xH100")
    lines = [flags.words(rng, row) for row in rng.sample(flags.ROWS, rng.choice((0, 1, 2, 3)))]
    if name == "sweep":
        lines += [
            (flag, rng.choice(_FEW)) for flag in ("--bs", "--ctx", "--rank")[: rng.choice((1, 2))]
        ]
    if name == "check":
        lines.append(often(rng, 0.3, "--min-headroom", rng.choice(("1GiB", "10%", "500MB"))))
    if name == "plan":
        lines += [("--ctx", "64"), often(rng, 0.3, rng.choice(("--max-bs", "--max-ctx")))]
    given = [word for line in lines for word in line]
    return Case((name, *of, *machine, *given, *_form(rng)))


def _named(rng: Random, models: tuple[str, ...]) -> tuple[str, ...]:
    found = rng.choice(models) if rng.random() < 0.7 else str(rng.choice(load_rows())["name"])
    return (found,) if rng.random() < 0.6 else ("--model", found)


def _form(rng: Random) -> tuple[str, ...]:
    return rng.choice((("--json",), ("--json",), (), ("--csv",)))


def _generated(rng: Random) -> list[str]:
    rows = [row for _, group in generate._groups() for row in group]
    rows = [row for row in rows if not set(row[0]).intersection(_LEFT_OUT)]
    found = ["--gpu", rng.choice(GPUS)] if rng.random() < 0.5 else ["--gpus", "8xH200"]
    for row in rng.sample(rows, rng.choice((0, 1, 2, 3))):
        found += _words(rng, row)
    return found


def _words(rng: Random, row: Row) -> tuple[str, ...]:
    name = rng.choice(row[0])
    if row[1] not in (TEXT, REPEAT):
        return (name,)
    return name, argument(rng, *_GENERATE.get(row[0][0], ("1", "2", "8"))).replace("\x00", "")


def run(case: Case, folder: Path) -> Done:
    """The command as it is: no short form of it has its figures alone."""
    return command(case, folder)


DOOR = Door("commands", make, run, seconds=_SECONDS)
