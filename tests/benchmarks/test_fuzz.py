"""Seeded inputs at every door and every input that once failed: exit code 0, 1, 2 or 3, no
traceback, figures that add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_doors import BY_NAME, DOORS, checks, corpus, flags
from fuzz_doors.door import Case, Done, Door, figures
from fuzz_doors.trial import EVERY_SCHEMA, case_of, tried
from napkinmath.base.errors import InputError
from napkinmath.cli.flags import SHARED
from napkinmath.inputs.option_table import OPTIONS
from napkinmath.inputs.option_table.option import FLAG, ON, SWITCH, Option

SEED = 1  # not that of the long run
INPUTS = {"links": 400, "snapshots": 400, "out-of-memory texts": 400, "requests": 200}
FEWER = {"commands": 25, "config.json": 30, "job files": 50, "lengths": 40}  # are priced, mostly
PRICED = ("flags", "arch", "config.json", "job files", "lengths")  # `figures` leaves out the advice
RUNNER = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz" / "run.py"
CRASHES = sorted(corpus.FOLDER.glob("*.json"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_seeded_inputs(door: Door) -> None:
    """The first of a seed, and that some are answered and some refused."""
    outcomes: set[bool] = set()
    quick = door._replace(call=figures) if door.name in PRICED else door
    for number in range(1, (INPUTS | FEWER).get(door.name, 100) + 1):
        case = case_of(door, SEED, number)
        found = tried(quick, case, number, seconds=float("inf"))
        assert not found.defect, (found.defect, case)
        outcomes.add(found.refused)
    assert outcomes == {True, False}


@pytest.mark.parametrize("file", CRASHES, ids=lambda file: file.stem)
def test_what_once_failed_is_answered_or_refused(file: Path) -> None:
    name, case = corpus.read(file)
    assert not tried(BY_NAME[name], case, EVERY_SCHEMA, seconds=float("inf")).defect


def test_the_corpus_has_cases_for_known_doors() -> None:
    assert CRASHES and {corpus.read(file)[0] for file in CRASHES} <= set(BY_NAME)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.is_at(FLAG)], ids=lambda o: o.key)
def test_every_option_is_drawn_with_a_value_that_it_knows(option: Option) -> None:
    assert any(option.flag in row[0] for _, rows in SHARED for row in rows)
    if option.key in ("model", "arch", "hub", "calibration"):  # drawn by other doors, or never
        return
    assert any(option.flag in row[0] for row in (*flags.ROWS, *flags.SELDOM)) or (
        option.key == "method"
    )

    def reads(value: str) -> bool:
        try:
            option.read(value)
        except InputError:
            return False
        return True

    if option.kind not in (SWITCH, ON):
        assert any(reads(value) for value in flags.known(option.flag)), option.flag


def test_an_input_is_the_same_for_ever() -> None:
    for door in DOORS:
        assert case_of(door, 3, 14) == case_of(door, 3, 14) != case_of(door, 3, 15)


def report(**changes: object) -> Done:
    """An answer with the fewest keys that the checks read."""
    content: dict[str, object] = {
        "components": [{"nbytes": 3}, {"nbytes": 4}],
        "memory": {"device": {"value": 7}},
        "time": {"mfu": 0.3, "hfu": 0.4},
    }
    return Done(0, json.dumps(content | changes), "")


@pytest.mark.parametrize(
    "changes",
    [
        {"components": [{"nbytes": 3}]},
        {"components": [{"nbytes": -1}, {"nbytes": 8}]},
        {"time": {"mfu": 0.5, "hfu": 0.4}},
        {"time": {"mfu": 0.5, "hfu": 1.4}},
        {"time": {"mfu": 0.3, "hfu": 0.4, "seconds": float("nan")}},
        {"time": {"mfu": 0.3, "hfu": 0.4, "seconds": float("inf")}},
    ],
)
def test_wrong_figures_are_found(changes: dict[str, object]) -> None:
    assert not checks.wrong_figures(report(), by_schema=False)
    assert checks.wrong_figures(report(**changes), by_schema=False)


@pytest.mark.parametrize(
    "done",
    [
        Done(70, "", "estimate: a defect\n"),
        Done(2, "", "one line\nand another\n"),
        Done(2, "half a table", "estimate: no\n"),
        Done(0, "", "Traceback (most recent call last):\n"),
        Done(-9, "", ""),
    ],
)
def test_untidy_ends_are_found(done: Done) -> None:
    assert not checks.untidy(Done(2, "", "estimate: no\n"))
    assert checks.untidy(done)


def test_failing_inputs_are_made_smaller_and_kept(tmp_path: Path) -> None:
    files = (("a.json", b'{"x": {"y": 1, "z": 2}, "w": 3}'), ("b.txt", b"\xff" + b"." * 40))
    case = Case(("--bs", "1", "--json", "--model", "@a.json"), files)

    def fails(less: Case) -> bool:
        a, b = (data for _, data in less.files)
        return "--model" in less.argv and b"z" in a and b"\xff" in b

    small = corpus.smaller(case, fails)
    assert small.argv == ("--model", "@a.json")
    assert dict(small.files)["a.json"] == b'{"x": {"z": 2}}' and len(dict(small.files)["b.txt"]) < 4
    assert corpus.read(corpus.write(tmp_path, "flags", small, "why")) == ("flags", small)


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def doors(file: str, *counts: int) -> dict[str, dict[str, object]]:
        for count in counts:
            words = ("--count", str(count), "--state", file, "--json", "found.json", "--seed", "3")
            argv = [sys.executable, str(RUNNER), *words, "--corpus", "crashes"]
            subprocess.run(argv, check=True, cwd=tmp_path, env=dict(os.environ))
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["inputs"] == counts[-1] and found["runs"][-1]["last"] == counts[-1] - 1
        outcomes = ("answered", "refused", "defect")
        return {name: {key: each[key] for key in outcomes} for name, each in found["doors"].items()}

    assert doors("twice.json", 7, 20) == doors("once.json", 20)
