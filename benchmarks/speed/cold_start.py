"""How long the whole cold command takes and how much memory it uses, beside Python itself, a table
library and its peers.

    python benchmarks/speed/cold_start.py [--runs 15] [--json FILE] [--peer-python PYTHON]

Commands take turns, so that a busy machine slows all of them; the fastest run of each counts, and
for memory the largest. A peer that is not installed or does not answer here (accelerate asks the
hub for the config) is listed with the reason. `--peer-python` names another interpreter that has
the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODEL = "llama-7b"
FLAGS = ("--model", MODEL, "--qlora", "--bs", "4", "--ctx", "2048")
MAIN = "from napkinmath.cli.main import entry; entry()"
DEEPSPEED = (
    "from deepspeed.runtime.zero.stage_1_and_2 import"
    " estimate_zero2_model_states_mem_needs_all_cold as f; f(total_params=6738415616,"
    " num_gpus_per_node=1, num_nodes=1)"
)
# As an installed package runs: with its bytecode compiled (the trial run before the first turn
# writes it).
ENVIRONMENT = {
    key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
} | {
    "PYTHONPATH": str(ROOT / "estimator"),
    "HF_HUB_OFFLINE": "1",
}
MEMORY_RUNS = 3
MOST_TABLE_RATIO, MOST_JSON_RATIO, MOST_JSON_MIB = 2.5, 8.0, 40.0


class Command(NamedTuple):
    name: str
    argv: tuple[str, ...]
    peer: bool = False


class Timing(NamedTuple):
    seconds: float
    peak_mib: float


def commands(peer_python: str, config: str) -> list[Command]:
    """What is compared; a peer's first word is a program beside its interpreter."""
    bin_folder = Path(peer_python).parent
    return [
        Command("python -c pass", (sys.executable, "-c", "pass")),
        Command(
            "import rich.console, rich.table",
            (sys.executable, "-c", "import rich.console, rich.table"),
        ),
        Command("estimate, report", (sys.executable, "-c", MAIN, *FLAGS)),
        Command("estimate --json", (sys.executable, "-c", MAIN, *FLAGS, "--json")),
        Command(
            "estimate --gpu, report", (sys.executable, "-c", MAIN, *FLAGS, "--gpu", "RTX 4090")
        ),
        Command("import napkinmath", (sys.executable, "-c", "import napkinmath")),
        Command(
            "vramcalc (16-bit LoRA)",
            (
                str(bin_folder / "vramcalc"),
                config,
                "--train",
                "--lora",
                "16",
                "--batch",
                "4",
                "--seq",
                "2048",
            ),
            True,
        ),
        Command(
            "accelerate estimate-memory",
            (str(bin_folder / "accelerate"), "estimate-memory", "huggyllama/llama-7b"),
            True,
        ),
        Command("deepspeed estimate_zero2", (peer_python, "-c", DEEPSPEED), True),
    ]


def run_once(argv: Sequence[str]) -> tuple[float, int, str]:
    """Wall time of one process, its exit code and the last line it complained with."""
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        code = subprocess.run(
            argv, stdout=subprocess.DEVNULL, stderr=errors, env=ENVIRONMENT
        ).returncode
        seconds = time.perf_counter() - started
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return seconds, code, lines[-1] if lines else ""


def peak_mib(argv: Sequence[str]) -> float:
    """Peak resident memory of one process, from its own status file while it runs.

    `wait4` and `getrusage` count the process before its exec too, which is a copy of this one. NaN
    where there is no /proc.
    """
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    status, found = Path(f"/proc/{process.pid}/status"), float("nan")
    while process.poll() is None:
        with contextlib.suppress(OSError):
            lines = status.read_text().splitlines()
            found = next(
                (int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), found
            )
    return found


def reason_to_skip(command: Command) -> str:
    """Why a command cannot be timed here; empty where it can."""
    if not Path(command.argv[0]).exists():
        return f"not installed ({Path(command.argv[0]).name})"
    _, code, complaint = run_once(command.argv)
    return (
        ""
        if code in (0, 1) and "Traceback" not in complaint and "Error" not in complaint
        else f"does not answer here: {complaint[:100]}"
    )


def measure(chosen: list[Command], runs: int) -> dict[str, Timing]:
    """The fastest and the largest of `runs` turns."""
    seconds = {command.name: float("inf") for command in chosen}
    for _ in range(runs):
        for command in chosen:
            seconds[command.name] = min(seconds[command.name], run_once(command.argv)[0])
    return {
        command.name: Timing(
            seconds[command.name], max(peak_mib(command.argv) for _ in range(MEMORY_RUNS))
        )
        for command in chosen
    }


def main() -> int:
    """Prints the table and the three budgets; 1 where one is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter that has the peers installed",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = commands(os.path.abspath(arguments.peer_python), write_config(folder))
        skipped = {command.name: reason_to_skip(command) for command in every}
        best = measure([command for command in every if not skipped[command.name]], arguments.runs)
    report(every, best, skipped)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps(
                {
                    "machine": machine(),
                    "runs": arguments.runs,
                    "commands": {k: v._asdict() for k, v in best.items()},
                    "skipped": {k: v for k, v in skipped.items() if v},
                },
                indent=1,
            )
        )
    return budgets(best)


def write_config(folder: str) -> str:
    """The model's config.json, for peers that read one."""
    sys.path.insert(0, str(ROOT / "estimator"))
    from napkinmath.catalog.models import find_row

    row = find_row(MODEL)
    assert row is not None
    file = Path(folder, "config.json")
    file.write_text(json.dumps(row["config"]))
    return str(file)


def machine() -> str:
    """Processor, system and Python, as a figure needs beside it."""
    names = (
        [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        if os.path.exists("/proc/cpuinfo")
        else []
    )
    return (
        f"{names[0] if names else platform.machine()}, {platform.system()}, Python"
        f" {platform.python_version()}"
    )


def report(every: list[Command], best: dict[str, Timing], skipped: dict[str, str]) -> None:
    print(machine())
    bare = best["python -c pass"].seconds
    print(f"{'':34}{'ms':>8}{'x python':>10}{'peak MiB':>10}")
    for command in every:
        if skipped[command.name]:
            print(f"{command.name:34}{skipped[command.name]}")
        else:
            timing = best[command.name]
            print(
                f"{command.name:34}{timing.seconds * 1e3:8.1f}{timing.seconds / bare:10.1f}{timing.peak_mib:10.1f}"
            )


def budgets(best: dict[str, Timing]) -> int:
    """Prints each budget with what was measured; 1 where one is exceeded."""
    rows = [
        (
            "estimate --json / python -c pass",
            best["estimate --json"].seconds / best["python -c pass"].seconds,
            MOST_JSON_RATIO,
        ),
        ("peak MiB of estimate --json", best["estimate --json"].peak_mib, MOST_JSON_MIB),
    ]
    if "import rich.console, rich.table" in best:
        rows.insert(
            0,
            (
                "estimate / import rich.console, rich.table",
                best["estimate, report"].seconds / best["import rich.console, rich.table"].seconds,
                MOST_TABLE_RATIO,
            ),
        )
    for name, value, most in rows:
        print(f"{name:44}{value:8.2f}  of {most:g}  {'ok' if value <= most else 'EXCEEDED'}")
    return int(any(value > most for _, value, most in rows))


if __name__ == "__main__":
    sys.exit(main())
