"""What takes too long for `make test` was run all the same: its last result is in
benchmarks/results. A new target (`make fuzz`, `make versions`, ...) adds its row here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
STAMPS = {
    "date": re.compile(r"\b20\d\d-[01]\d-[0-3]\d(?!\d)"),
    "commit": re.compile(r"\bcommit\W{1,5}[0-9a-f]{7,40}\b"),
}


class Recorded(NamedTuple):
    """A program or target of the Makefile, where its last result is, and what that is stamped
    with."""

    target: str
    result: str
    stamps: tuple[str, ...] = ()


RECORDED = (
    Recorded("browsers/run.py", "cpu/browsers.json", ("date",)),
    Recorded("compile_gate.py", "compile_gate.csv"),
    Recorded("agreement_matrix.py", "cpu/agreement_real.md"),
    Recorded("parallel_traced.py", "cpu/parallel_traced.md"),
    Recorded("extrapolation.py", "cpu/extrapolation.json", ("date",)),
    Recorded("held_out_ranges.py", "published/held_out_ranges.md"),
    Recorded("held_out_speed.py", "published/held_out_speed.md"),
    Recorded("published.py", "published/blind.md"),
    Recorded("nanotron_runs.py", "published/nanotron.md"),
    Recorded("notebooks.py", "published/notebooks.md"),
    Recorded("fuzz/run.py", "cpu/fuzz.json", ("date",)),
    Recorded("fuzz/run.py", "cpu/fuzz_newest.json", ("date",)),
    Recorded("fuzz/run.py", "cpu/fuzz_processes.json", ("date",)),
    Recorded("doors.py", "cpu/doors.json"),
    Recorded("batch_speed.py", "cpu/batch_speed.json"),
    Recorded("cold_start.py", "cpu/cold_start.json"),
    Recorded("parallel_speed.py", "cpu/parallel_speed.json"),
    Recorded("plan_speed.py", "cpu/plan_speed.json"),
    Recorded("preflight_speed.py", "cpu/preflight_speed.json"),
    Recorded("serve_load.py", "cpu/serve_load.json"),
    Recorded("snapshot_speed.py", "cpu/snapshot_speed.json"),
    Recorded("trace_speed.py", "cpu/trace_speed.json"),
    Recorded("watch_overhead.py", "cpu/watch_overhead.json", ("date",)),
)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.target)
def test_the_last_result_is_there(recorded: Recorded) -> None:
    result = BENCHMARKS / "results" / recorded.result
    assert result.is_file(), f"run {recorded.target} and commit {result.relative_to(ROOT)}"
    text = result.read_text(encoding="utf-8")
    missing = [stamp for stamp in recorded.stamps if not STAMPS[stamp].search(text)]
    assert text.strip() and not missing, f"{recorded.result} does not say its {missing}"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.target)
def test_what_makes_it_is_still_there(recorded: Recorded) -> None:
    if recorded.target.startswith("make "):
        rule = rf"^{recorded.target.removeprefix('make ')}:"
        assert re.search(rule, (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    else:
        programs = (*BENCHMARKS.rglob(recorded.target), *ROOT.glob(f"kernels/*/{recorded.target}"))
        assert programs
