"""Does any input break napkinmath? Seeded inputs for every door, answers held to what must be true.

    python benchmarks/fuzz/run.py --count 500000 --seed 0 --state FILE [--json FILE] [--seconds S]

Goes on from the state file where it was stopped. One input in 250 runs as a process of its own, one
in 200 has its limits priced anew, one in 20 is held against the JSON schema, one in 4 has the
report's comparisons with other configurations and GPUs. With `--processes` every input is a process
of its own, of the doors that are commands. An input that fails is
made smaller and written to the corpus, once for each way to fail; `tests/benchmarks/test_fuzz.py`
replays the corpus. Doors and their inputs are in `fuzz_doors/`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("estimator", "profiler", "benchmarks/fuzz")]

from fuzz_doors import DOORS, corpus, tally  # noqa: E402
from fuzz_doors.door import Case, Door  # noqa: E402
from fuzz_doors.trial import Trial, case_of, limit_process, tried, tried_whole  # noqa: E402

INPUTS_TO_WARM = 25  # of each door at most: a chunk of 500 inputs spends a third of its time less
CHUNK = 500  # inputs a process: what it keeps of them ends with it
FEWER = 50  # where each input is a process of its own, ten times as slow
SECONDS_TO_SHRINK = 1.0  # inputs that take longer are kept as they are


class Asked(NamedTuple):
    """Which inputs are tried, and whether each is a process of its own."""

    seed: int
    processes: bool

    @property
    def doors(self) -> tuple[Door, ...]:
        return tuple(door for door in DOORS if door.is_command or not self.processes)


def warm(seed: int, inputs: int) -> None:
    """Some inputs of every door, uncounted: what they load is there in every process that follows.
    No more than are to be tried after them.
    """
    limit_process()
    for door in DOORS:
        for number in range(min(INPUTS_TO_WARM, inputs // len(DOORS))):
            tried(door, case_of(door, seed, number), 1)
    gc.collect()
    gc.freeze()


def chunk(asked: Asked, first: int, last: int, folder: Path, results: Connection) -> None:
    """Inputs first to last, round robin over the doors, in a process of its own."""
    limit_process()
    tallies = {door.name: tally.empty() for door in asked.doors}
    for index in range(first, last):
        door, number = asked.doors[index % len(asked.doors)], index // len(asked.doors)
        case = case_of(door, asked.seed, number)
        found = (tried_whole if asked.processes else tried)(door, case, number)
        is_new = found.defect not in tallies[door.name]["defects"]
        tally.count(tallies[door.name], found, number)
        if found.defect:
            print(f"{door.name} {number}: {found.defect}", flush=True)
        if found.defect and is_new:
            keep(door, case, found, folder)
    results.send(tallies)


def keep(door: Door, case: Case, found: Trial, folder: Path) -> None:
    """Writes an input that failed, made smaller, unless another one failed in the same way."""
    if found.defect in {
        json.loads(path.read_text(encoding="utf-8"))["found"] for path in folder.glob("*.json")
    }:
        return
    if found.seconds < SECONDS_TO_SHRINK:
        case = corpus.smaller(case, lambda less: tried(door, less).defect == found.defect)
    corpus.write(folder, door.name, case, found.defect)


class Started(NamedTuple):
    """A chunk of inputs under way in a process of its own."""

    first: int
    last: int
    child: ForkProcess
    results: Connection


def start(asked: Asked, first: int, last: int, folder: Path) -> Started:
    """A process that tries the inputs first to last."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=chunk, args=(asked, first, last, folder, sender))
    child.start()
    sender.close()
    return Started(first, last, child, receiver)


def tallies_of(started: Started) -> dict[str, Any]:
    """The tallies of a chunk; a process that dies is a defect of its own."""
    first, last, child, results = started
    try:
        return results.recv()
    except EOFError:
        died = tally.empty()
        died[tally.DEFECT] = last - first
        died["defects"] = {f"the process of inputs {first} to {last - 1} died": last - first}
        return {DOORS[0].name: died}
    finally:
        child.join()


def read_state(file: Path, asked: Asked) -> dict[str, Any]:
    """What was tried before; exits where it was asked in another way."""
    if not file.exists():
        doors = {door.name: tally.empty() for door in asked.doors}
        rest: dict[str, Any] = {"inputs": 0, "processor_seconds": 0.0, "runs": [], "doors": doors}
        return {"seed": asked.seed, "processes": asked.processes, **rest}
    state = json.loads(file.read_text(encoding="utf-8"))
    before = Asked(state["seed"], state.get("processes", False))
    if before != asked:
        sys.exit(f"{file} is of {before}, not of {asked}; use another file")
    return state


def write(file: Path, state: dict[str, Any]) -> None:
    """Replaces the file at once, so that a killed run leaves the one before."""
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def run(
    state: dict[str, Any], file: Path, count: int, folder: Path, seconds: float, jobs: int
) -> None:
    """Tries inputs from where the state stands up to `count`, or until the time is over.

    `jobs` chunks run at a time; the state is written when all of them are back.
    """
    asked = Asked(state["seed"], state.get("processes", False))
    size = FEWER if asked.processes else CHUNK
    if not asked.processes:
        warm(asked.seed, count - state["inputs"])
    end, commit, runs = time.monotonic() + seconds, _commit(), state["runs"]
    while state["inputs"] < count and time.monotonic() < end:
        edges = [min(count, state["inputs"] + size * each) for each in range(jobs + 1)]
        if not runs or runs[-1]["commit"] != commit:
            runs.append({"commit": commit, "first": edges[0]})
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        under_way = [start(asked, first, last, folder) for first, last in itertools.pairwise(edges)]
        for name, more in (each for one in under_way for each in tallies_of(one).items()):
            state["doors"][name] = tally.merged(state["doors"].get(name, tally.empty()), more)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        state["processor_seconds"] = round(
            state["processor_seconds"] + after.ru_utime - before.ru_utime, 1
        )
        runs[-1] |= {"last": edges[-1] - 1, "date": datetime.now(timezone.utc).date().isoformat()}
        state["inputs"] = edges[-1]
        write(file, state)
        print(f"{edges[-1]} inputs, {_defects(state)} defects", flush=True)


def _defects(state: dict[str, Any]) -> int:
    return sum(each[tally.DEFECT] for each in state["doors"].values())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Returns 1 where a defect was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500_000, help="inputs of all doors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "fuzz-state.json")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--corpus", type=Path, default=corpus.FOLDER)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--processes", action="store_true", help="each input as a process")
    options = parser.parse_args()
    file, written = options.state.resolve(), options.json and options.json.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    state = read_state(file, Asked(options.seed, options.processes))
    run(state, file, options.count, options.corpus.resolve(), options.seconds, options.jobs)
    if written:
        write(written, state)
    return int(_defects(state) > 0)


if __name__ == "__main__":
    sys.exit(main())
