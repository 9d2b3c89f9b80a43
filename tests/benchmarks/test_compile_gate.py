"""Every shipped configuration compiles for every architecture and keeps the rules; the recorded
table is current."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
TABLE = ROOT / "benchmarks" / "results" / "compile_gate.csv"
GATE = ROOT / "benchmarks" / "kernels" / "compile_gate.py"


if f",{triton.__version__}," not in TABLE.read_text():
    pytest.skip(
        f"no rows of triton {triton.__version__}: record them with `compile_gate --write`",
        allow_module_level=True,
    )

RUNS = """
import contextlib, dataclasses, io, json, sys
sys.path.insert(0, sys.argv[1])
import compile_gate as gate
ends = {}
for name, arguments in json.loads(sys.argv[2]).items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = gate.main(arguments)
    ends[name] = code, said.getvalue()
row = next(iter(gate.read_table(gate.Path(sys.argv[3])).values()))
config = next(one for one in gate.all_shipped() if one.name == row.kernel)
spills = []
for stack, local, most in ((0, 0, 0), (8, 2, 2), (8, 3, 2), (8, 2, 0), (8, 0, 2)):
    spilling = dataclasses.replace(row, stack_bytes=stack, spills=local)
    allowed = dataclasses.replace(config, most_spills=most)
    spills.append(any("spills" in fault for fault in gate.faults(spilling, allowed)))
print(json.dumps({"ends": ends, "spills": spills}))
"""
ONE = ["--all", "--only", "rms_norm_forward h=4096", "--arch"]
WRONG = {
    "registers": "recorded",
    "source_hash": "changed since it was recorded",
    "kernel": "no longer shipped",
}


def wrong_table(folder: Path, column: str) -> str:
    """A copy of the table with one cell changed, of a kernel that is quick to compile."""
    lines = TABLE.read_text().splitlines()
    index = next(
        i
        for i, line in enumerate(lines)
        if line.startswith("rms_norm_forward h=4096,90") and f",{triton.__version__}," in line
    )
    cells = lines[index].split(",")
    cells[lines[0].split(",").index(column)] = "7"
    lines[index] = ",".join(cells)
    table = folder / f"{column}.csv"
    table.write_text("\n".join(lines) + "\n")
    return str(table)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How every run of the gate ended, (exit code, what it printed), all in one process of their
    own: the interpreter's switch, set for the other tests, would hide the compiler."""
    folder = tmp_path_factory.mktemp("tables")
    tables = {column: wrong_table(folder, column) for column in WRONG}
    runs = {
        "shipped": ["--table", str(TABLE)],
        "today": ["--table", str(TABLE), *ONE, "80", "90"],
        # the numbers of a row are compared only where it is compiled again
        "registers": ["--table", tables["registers"], *ONE, "90"],
        "source_hash": ["--table", tables["source_hash"]],
        "kernel": ["--table", tables["kernel"]],
    }
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", RUNS, str(GATE.parent), json.dumps(runs), str(TABLE)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def test_every_shipped_configuration_keeps_the_rules_and_the_table_is_current(gate):
    code, said = gate["ends"]["shipped"]
    assert code == 0, said


def test_recorded_rows_are_what_the_compiler_makes_today(gate):
    """Compiles one configuration again, so that a table edited by hand does not pass."""
    code, said = gate["ends"]["today"]
    assert code == 0, said
    assert "2 configurations keep the rules, 2 compiled" in said


@pytest.mark.parametrize("column", WRONG)
def test_a_wrong_table_is_noticed(gate, column):
    code, said = gate["ends"][column]
    assert code == 1 and WRONG[column] in said, said


def test_spills_are_faults_beyond_what_a_timed_tile_may_have(gate):
    assert gate["spills"] == [False, False, True, True, True]


LISTING = """
        /*0100*/                   LDGSTS.E.BYPASS.128 [R1], [R2] ;
        /*0110*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4] ;
        /*0120*/              @!P2 BRA 0x150 ;
        /*0130*/                   FSEL R1, R2, R3, P0 ;
        /*0140*/                   FSEL R2, R2, R3, P0 ;
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0160*/               @P0 BRA 0x100 ;
        /*0170*/                   EXIT ;
        /*0180*/                   BRA 0x180;
        /*0190*/                   NOP ;
"""


def test_the_hottest_loop_and_what_a_turn_without_mask_skips():
    sys.path.insert(0, str(GATE.parent))
    try:
        import machine_code
    finally:
        sys.path.remove(str(GATE.parent))
    instructions = machine_code.instructions_of(LISTING)
    assert machine_code.count(instructions, "WARPGROUP") == 1 and len(instructions) == 9
    loop = machine_code.hottest_loop(instructions)
    assert loop == machine_code.Loop(instructions=7, skipped=2, products=1)
    log = "ptxas info : (C7515) Potential Performance Loss: wgmma serialized ... (C7510)"
    assert machine_code.advisories(log) == "C7510 C7515"
