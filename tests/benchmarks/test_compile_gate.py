"""Every shipped configuration compiles for every architecture and keeps the rules; the recorded
table is current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def run_gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The gate in a process of its own: the interpreter's switch, set for the other tests, would
    hide the compiler."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, str(GATE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_every_shipped_configuration_keeps_the_rules_and_the_table_is_current():
    run = run_gate("--table", str(TABLE))
    assert run.returncode == 0, run.stdout + run.stderr


def test_recorded_rows_are_what_the_compiler_makes_today():
    """Compiles one configuration again, so that a table edited by hand does not pass."""
    run = run_gate(
        "--table", str(TABLE), "--all", "--only", "rms_norm_forward h=4096", "--arch", "80", "90"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 configurations keep the rules, 2 compiled" in run.stdout


@pytest.mark.parametrize(
    ("replacement", "says"),
    [
        ("registers", "recorded"),
        ("source_hash", "changed since it was recorded"),
        ("kernel", "no longer shipped"),
    ],
)
def test_a_wrong_table_is_noticed(tmp_path, replacement, says):
    lines = TABLE.read_text().splitlines()
    columns = lines[0].split(",")
    index = next(
        i
        for i, line in enumerate(lines)
        if line.startswith("rms_norm_forward h=4096,90") and f",{triton.__version__}," in line
    )
    cells = lines[index].split(",")
    cells[columns.index(replacement)] = "7"
    lines[index] = ",".join(cells)
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    arguments = (
        ["--all", "--only", "rms_norm_forward h=4096", "--arch", "90"]
        if replacement == "registers"
        else []
    )
    run = run_gate("--table", str(table), *arguments)
    assert run.returncode == 1 and says in run.stdout, run.stdout + run.stderr


PRINT_FAULTS = """
import dataclasses, sys
sys.path.insert(0, sys.argv[1])
import compile_gate as gate
row = next(iter(gate.read_table(gate.Path(sys.argv[2])).values()))
config = next(one for one in gate.all_shipped() if one.name == row.kernel)
for stack, spills, most in ((0, 0, 0), (8, 2, 2), (8, 3, 2), (8, 2, 0), (8, 0, 2)):
    spilling = dataclasses.replace(row, stack_bytes=stack, spills=spills)
    allowed = dataclasses.replace(config, most_spills=most)
    print(any("spills" in fault for fault in gate.faults(spilling, allowed)))
"""


def test_spills_are_faults_beyond_what_a_timed_tile_may_have():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRINT_FAULTS, str(GATE.parent), str(TABLE)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["False", "False", "True", "True", "True"], run.stderr


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
