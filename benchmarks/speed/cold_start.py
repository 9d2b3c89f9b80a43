"""How long the whole cold command takes and how much memory it uses, beside Python itself, a table
library and its peers.

    python benchmarks/speed/cold_start.py [--runs 15] [--json FILE] [--peer-python PYTHON]
    python benchmarks/speed/cold_start.py --gate [FILE]

Commands take turns, so that a busy machine slows all of them; the fastest run of each counts, and
for memory the largest. A peer that is not installed or does not answer here (accelerate asks the
hub for the config) is listed with the reason. `--peer-python` names another interpreter that has
the peers.

`--gate` compares with a baseline that `--json` wrote, and exits with 1 where a figure is more than
5% above it. What is compared are ratios of two commands of one run: milliseconds change with the
machine, for both commands by about as much. They are ratios of processor time, which a command
that waits for a busy machine does not use up. A ratio above its limit is measured twice more: what
else a machine does only adds to a time, so that the fastest of all turns counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import resource
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
BASELINE = ROOT / "benchmarks" / "results" / "cpu" / "cold_start.json"
TOLERANCE = 0.05
GATE_RUNS, GATE_ROUNDS = 30, 3
MEMORY_RUNS = 3
MOST_TABLE_RATIO, MOST_JSON_RATIO, MOST_JSON_MIB = 2.5, 8.0, 40.0


class Command(NamedTuple):
    name: str
    argv: tuple[str, ...]
    peer: bool = False


class Timing(NamedTuple):
    seconds: float
    processor_seconds: float
    peak_mib: float


class Ratio(NamedTuple):
    """One command's figure (a field of Timing) over another's."""

    of: str
    over: str
    field: str = "seconds"

    def __str__(self) -> str:
        return f"{self.field}, {self.of} / {self.over}"

    def value(self, best: dict[str, Timing]) -> float:
        """NaN where a command of it was not measured."""
        if self.of not in best or self.over not in best:
            return float("nan")
        return getattr(best[self.of], self.field) / getattr(best[self.over], self.field)


BARE, TABLES, REPORT, JSON = (
    "python -c pass",
    "import rich.console, rich.table",
    "estimate, report",
    "estimate --json",
)
TABLE_RATIO, JSON_RATIO = Ratio(REPORT, TABLES), Ratio(JSON, BARE)
GATED = (
    Ratio(REPORT, TABLES, "processor_seconds"),
    Ratio(JSON, BARE, "processor_seconds"),
    Ratio("import napkinmath", BARE, "processor_seconds"),
    Ratio(REPORT, BARE, "peak_mib"),
)


def commands(peer_python: str, config: str) -> list[Command]:
    """What is compared; a peer's first word is a program beside its interpreter."""
    bin_folder = Path(peer_python).parent
    return [
        Command(BARE, (sys.executable, "-c", "pass")),
        Command(TABLES, (sys.executable, "-c", TABLES)),
        Command(REPORT, (sys.executable, "-c", MAIN, *FLAGS)),
        Command(JSON, (sys.executable, "-c", MAIN, *FLAGS, "--json")),
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


class Once(NamedTuple):
    """One process: its times, its exit code and the last line it complained with."""

    seconds: float
    processor_seconds: float
    code: int
    complaint: str


def run_once(argv: Sequence[str]) -> Once:
    with tempfile.TemporaryFile() as errors:
        before, started = processor_seconds(), time.perf_counter()
        code = subprocess.run(
            argv, stdout=subprocess.DEVNULL, stderr=errors, env=ENVIRONMENT
        ).returncode
        seconds, used = time.perf_counter() - started, processor_seconds() - before
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return Once(seconds, used, code, lines[-1] if lines else "")


def processor_seconds() -> float:
    """What all processes that have ended used, in user and system."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
    tried = run_once(command.argv)
    failed = tried.code not in (0, 1) or any(
        word in tried.complaint for word in ("Traceback", "Error")
    )
    return f"does not answer here: {tried.complaint[:100]}" if failed else ""


def measure(chosen: list[Command], runs: int) -> dict[str, Timing]:
    """The fastest and the largest of `runs` turns."""
    turns: dict[str, list[Once]] = {command.name: [] for command in chosen}
    for _ in range(runs):
        for command in chosen:
            turns[command.name].append(run_once(command.argv))
    return {
        command.name: Timing(
            min(turn.seconds for turn in turns[command.name]),
            min(turn.processor_seconds for turn in turns[command.name]),
            max(peak_mib(command.argv) for _ in range(MEMORY_RUNS)),
        )
        for command in chosen
    }


def main() -> int:
    """Prints the table and the budgets, or the gate; 1 where one is exceeded."""
    arguments = parsed()
    if arguments.gate:
        return gate(arguments.gate, arguments.runs or GATE_RUNS)
    runs = arguments.runs or 15
    with tempfile.TemporaryDirectory() as folder:
        every = commands(os.path.abspath(arguments.peer_python), write_config(folder))
        skipped = {command.name: reason_to_skip(command) for command in every}
        best = measure([command for command in every if not skipped[command.name]], runs)
    report(every, best, skipped)
    if arguments.json:
        Path(arguments.json).write_text(written(best, skipped, runs))
    return budgets(best)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, metavar="N", help=f"turns [15; {GATE_RUNS} of --gate]")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--gate",
        nargs="?",
        type=Path,
        const=BASELINE,
        metavar="FILE",
        help="compare with the ratios of FILE, without peers [the committed one]",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter that has the peers installed",
    )
    return parser.parse_args()


def written(best: dict[str, Timing], skipped: dict[str, str], runs: int) -> str:
    """The figures as JSON; `ratios` are what the gate reads again."""
    figures = {
        "machine": machine(),
        "runs": runs,
        "ratios": {str(ratio): round(ratio.value(best), 4) for ratio in GATED},
        "commands": {name: timing._asdict() for name, timing in best.items()},
        "skipped": {name: reason for name, reason in skipped.items() if reason},
    }
    return json.dumps(figures, indent=1)


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
    bare = best[BARE].seconds
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
        (str(TABLE_RATIO), TABLE_RATIO.value(best), MOST_TABLE_RATIO),
        (str(JSON_RATIO), JSON_RATIO.value(best), MOST_JSON_RATIO),
        (f"peak MiB of {JSON}", best[JSON].peak_mib, MOST_JSON_MIB),
    ]
    for name, value, most in rows:
        print(f"{name:62}{value:8.2f}  of {most:g}  {said(value, most)}")
    return int(any(value > most for _, value, most in rows))


def gate(baseline: Path, runs: int) -> int:
    """Prints each ratio beside the baseline's; 1 where one is too far above it or was not measured,
    2 for a baseline without it."""
    before: dict[str, float] = json.loads(baseline.read_text()).get("ratios", {})
    if missing := [str(ratio) for ratio in GATED if str(ratio) not in before]:
        print(f"{baseline} has no ratio {missing[0]!r}: record it by --json", file=sys.stderr)
        return 2
    limits = {ratio: before[str(ratio)] * (1 + TOLERANCE) for ratio in GATED}
    chosen = [command for command in commands(sys.executable, "") if not command.peer]
    best = measure([command for command in chosen if not reason_to_skip(command)], runs)
    for _ in range(GATE_ROUNDS - 1):
        if any(ratio.value(best) > most for ratio, most in limits.items()):
            best = fastest(best, measure([c for c in chosen if c.name in best], runs))
    for ratio, most in limits.items():
        value, was = ratio.value(best), before[str(ratio)]
        print(
            f"{ratio!s:74}{value:8.2f}  was {was:.2f}, {value / was - 1:+.1%}  {said(value, most)}"
        )
    return int(any(said(ratio.value(best), most) != "ok" for ratio, most in limits.items()))


def fastest(best: dict[str, Timing], again: dict[str, Timing]) -> dict[str, Timing]:
    """The least of every figure."""
    return {
        name: Timing(*(min(pair) for pair in zip(timing, again[name], strict=True)))
        for name, timing in best.items()
    }


def said(value: float, most: float) -> str:
    """Whether a figure is within its limit; NaN is one that was not measured."""
    return "not measured" if math.isnan(value) else "ok" if value <= most else "EXCEEDED"


if __name__ == "__main__":
    sys.exit(main())
