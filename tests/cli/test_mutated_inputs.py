"""Files and flags that people give, with a few values changed for others: each is answered or
refused by one line, and never met by an exception of another kind.

NAPKINMATH_FUZZ multiplies how many are tried.
"""

from __future__ import annotations

import copy
import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.runs import run
from napkinmath.catalog.models import load_rows
from napkinmath.cli.flag_rows import REPEAT, TEXT, meaning
from napkinmath.cli.flags import SHARED

TIMES = int(os.environ.get("NAPKINMATH_FUZZ", "1"))
JOBS = Path(__file__).parent / "jobs"
FLAGS = [
    row for title, rows in SHARED if title not in ("model", "workload", "output") for row in rows
]
HUGE = 1 << 60
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 4.0, 8.0, 0.5, 7, HUGE, -HUGE, 10**400, 1e308, -1.5),
    *(float("nan"), float("inf"), "", "8", "auto", "full", "a" * 300, "\x00", "1e99", "nan"),
    *([], [1], [0, "x"], [[]], [None], [-1, 10**9], ["full_attention"], {}, {"a": 1}, {"": []}),
)
MODELS = (
    ("--arch", "L4 h64 a4 kv2 f128 v256"),
    ("--arch", "L4 h64 a4 f128 v256 moe4x2"),
    ("--arch", "L4 h64 a4 f256 v256 gelu learned-pos"),
)
MACHINES = ((), ("--gpu", "H100"), ("--gpus", "8xH100"), ("--gpus", "16xA100-80"))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value, or one within it, can be replaced."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    own = [place for key in keys for place in places(value[key], (*path, key))]
    return own + ([path] if path else [])


def mutate(content: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with one to three values replaced, cut short or doubled."""
    content = copy.deepcopy(content)
    for _ in range(chance.randint(1, 3)):
        found = places(content)
        if not found:
            break
        *above, last = chance.choice(found)
        holder: Any = content
        for key in above:
            holder = holder[key]
        old = holder[last]
        if isinstance(old, list) and old and chance.random() < 0.5:
            holder[last] = old[: chance.randint(0, len(old) - 1)]
        elif isinstance(old, (int, float)) and abs(old) < HUGE and chance.random() < 0.4:
            holder[last] = chance.choice((-old, old * 2, old + 1, old // 3, str(old), float(old)))
        else:
            holder[last] = copy.deepcopy(chance.choice(ODD))
    return content


def check(argv: tuple[str, ...], given: object = None) -> None:
    done = run(*argv)
    said = (argv, given, done.code, done.err)
    assert done.code in (0, 1, 2, 3), said
    if done.code == 2:
        assert len(done.err.splitlines()) == 1 and not done.out, said


@cache
def job_contents() -> list[dict[str, Any]]:
    texts = [file.read_text() for file in sorted(JOBS.glob("*.[yj]*"))]
    return [found for text in texts if isinstance(found := yaml.safe_load(text), dict)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8 * TIMES))
def test_config_with_values_changed(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    config = mutate(chance.choice(load_rows())["config"], chance)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    stack = chance.choice(((), (), ("--lora",), ("--gpu", "H100"), ("--stack", "litgpt")))
    check(("--model", str(file), "--ctx", "64", "--json", *stack), config)


@pytest.mark.parametrize("seed", range(8 * TIMES))
def test_job_file_with_values_changed(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    job = mutate(chance.choice(job_contents()), chance)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    check((str(file), *chance.choice(MODELS), "--json"), job)


MESHES = """--tp 2|--tp 4|--pp 2|--pp 4|--cp 2|--ep 2|--zero 1|--zero 2|--zero 3|--data-parallel fsdp2
--data-parallel fsdp1|--data-parallel ddp|--data-parallel dp|--data-parallel megatron|--micro-batches 4
--micro-batches 8|--schedule 1f1b|--schedule interleaved|--schedule gpipe|--schedule naive
--stack megatron|--stack deepspeed|--stack torchtune|--stack litgpt|--stack unsloth|--precision fp8
--precision fp16-amp|--precision bf16-amp|--lora|--qlora|--method dora|--method ia3|--method prompt
--checkpointing full|--checkpointing every:2|--checkpointing selective|--checkpointing offload
--optimizer sgd|--optimizer adamw-8bit|--optimizer muon|--optimizer paged-adamw-8bit|--kernels liger
--offload optimizer|--offload parameters|--grad-accum 3|--compile|--packing|--bs 3|--attention eager
--optimizer-in-backward|--sequence-parallel|--ema|--workload dpo|--quant int8|--bucket-mb 1
--eval|--clip 1"""
ALLOWED = [tuple(line.split()) for line in MESHES.replace("\n", "|").split("|")]


@pytest.mark.parametrize("seed", range(12 * TIMES))
def test_allowed_flags_together(seed: int) -> None:
    """Words that are understood one by one, so that most lines are priced."""
    chance = random.Random(seed)
    words = [word for flag in chance.sample(ALLOWED, chance.randint(2, 5)) for word in flag]
    check((*chance.choice(MODELS), "--ctx", "64", *chance.choice(MACHINES), *words, "--json"))


def flag(chance: random.Random) -> tuple[str, ...]:
    """A flag with a value that its help gives, or an odd one."""
    row = chance.choice(FLAGS)
    name = chance.choice(row[0])
    if row[1] not in (TEXT, REPEAT):
        return (name,)
    words = [
        word.strip("(),;:'\"") for word in f"{row[2]} {meaning(row)}".replace("|", " ").split()
    ]
    return name, chance.choice([*words, *("1", "2", "4", "8", "0", "1k"), str(HUGE)])


@pytest.mark.parametrize("seed", range(12 * TIMES))
def test_flags_together(seed: int) -> None:
    chance = random.Random(seed)
    words = [word for _ in range(chance.randint(1, 6)) for word in flag(chance)]
    check((*chance.choice(MODELS), "--ctx", "64", *chance.choice(MACHINES), *words, "--json"))
