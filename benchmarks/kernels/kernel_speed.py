"""Times this project's kernels and their peers on one GPU, in turn, over rotated inputs.

    python benchmarks/kernels/kernel_speed.py --budget 300 --out benchmarks/results/h200

Everything is compiled first, by a process a core; then each operation is timed. Whole steps come
last and have a quarter of the budget to themselves, so that they are cut last. `--only` takes some
operations and gives them all of it. kernels.jsonl grows row by row, and a short table is printed
last. The same command goes on where an earlier one stopped: what was measured on this device is not
timed again. A contestant that breaks the GPU's context is a row, and a new process goes on without
it. `--device cpu` tries the program out on tiny shapes; such rows are marked and say nothing about
a GPU. `--dry-run` says what would be timed, for how long, and what is not installed; it needs no
GPU and writes nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels"))

import torch  # noqa: E402
from kernel_rows import (  # noqa: E402
    attention,
    correctness,
    elementwise,
    environment,
    experts,
    goals,
    loss,
    quantized,
    steps,
    tiles,
)
from kernel_rows.archive import Archive  # noqa: E402
from kernel_rows.goals import LOST  # noqa: E402
from kernel_rows.lost_context import ContextLost  # noqa: E402
from kernel_rows.timing import Case, Clock, Rows, run_case  # noqa: E402

MAKERS = (
    quantized.dequantize_cases,
    quantized.qlora_cases,
    loss.cases,
    attention.cases,
    elementwise.cases,
    experts.cases,
    tiles.cases,
)
STEPS_SHARE = 0.25
COMPILING_SHARE = 0.3  # at most; what compiling leaves goes to timing
#: A run may pass its budget by this much before it is ended with a traceback: a kernel that hangs.
GRACE_S = 45.0
SECONDS_A_CASE, SECONDS_A_TRIAL = 1.6, 0.02


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, help="seconds the whole run may take"
    )
    parser.add_argument("--out", type=Path, help="folder for kernels.jsonl")
    parser.add_argument(
        "--archive", type=Path, help="a .tar.gz of that folder, kept current while the run goes on"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="substring of the ops to run")
    parser.add_argument(
        "--compile-only", default=None, metavar="GROUP:INDEX", help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    if options.out is None and not options.dry_run:
        parser.error("--out FOLDER is where the rows go; --dry-run needs none")
    return options


def plan_lines(only: str) -> list[str]:
    """What a run would time at the goals' sizes, with whom, and the packages that are missing."""
    cpu = torch.device("cpu")
    tried = {case.op: case for make in MAKERS for case in make(cpu, True) if only in case.op}
    missing = [name for name in environment.PEERS if environment.version_of(name) is None]
    found, timed = [], 0
    for op, shape in dict.fromkeys((aim.op, aim.shape) for aim in goals.aims()):
        if only in op and op in tried:
            timed += 1
            case = tried[op]
            later = [name for name, why in case.absent.items() if why.endswith("needs a GPU")]
            found.append(f"{op:<26} {shape}: {', '.join([*case.calls(), *later])}")
            never = {name: why for name, why in case.absent.items() if name not in later}
            found += [f"{'':<26} without {name}: {why}" for name, why in never.items()]
    steps_too = only in goals.step_op()
    if not timed and not steps_too:
        return []
    if steps_too:
        found += [f"{goals.step_op():<26} {tokens} tokens" for tokens in goals.STEP_TOKENS]
    found.append(f"not installed: {', '.join(missing) or 'nothing'}")
    share = f", and a quarter of the budget for {len(goals.STEP_TOKENS)} steps" if steps_too else ""
    found.append(f"{timed} comparisons of {SECONDS_A_CASE:g} s after compiling{share}")
    return found


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line a goal, then one for each contestant that was timed."""
    lines = []
    for row in rows:
        name = f"{row['op']:<26} {row['shape']:<34}"
        if row["contestant"] == "goal":
            value = f"{row['value']:8.3f}" if "value" in row else "       -"
            lines.append(f"{name} {value}  {row['status']:<12} {row['goal']}")
        elif row["status"] == "measured":
            share = (
                f"  {100 * row['share_of_copy']:5.1f}% of copy" if "share_of_copy" in row else ""
            )
            peak = (
                f"  {row['peak_bytes'] / 2**20:9.1f} MiB"
                if row.get("peak_bytes") is not None
                else ""
            )
            lines.append(
                f"{name} {1e6 * row['median_s']:10.1f} us  {row['contestant']}{share}{peak}"
            )
        elif row["status"] in ("failed", "wrong", LOST):
            lines.append(
                f"{name} {row['status']:>10}     {row['contestant']}:"
                f" {row.get('reason', row.get('relative_error'))}"
            )
    return lines


@contextlib.contextmanager
def failures_as_rows(rows: Rows, group: str) -> Iterator[None]:
    """What a group of cases cannot make costs the others nothing."""
    try:
        yield
    except ContextLost:
        raise
    except (
        Exception
    ) as error:  # a library that is missing or older, memory that another process took
        rows.add(
            op=group,
            shape="",
            contestant="napkinmath",
            status="failed",
            reason=f"{type(error).__name__}: {error}"[:300],
        )


def compile_one(place: str, device: torch.device) -> None:
    """Runs ours once at one case of a group, so that Triton's cache on disk has its kernels. Tiles
    that are chosen by timing are all compiled; what was timed beside other processes is forgotten.
    """
    group, _, index = place.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NAPKINMATH_KERNEL_CHOICES"] = str(Path(folder) / "choices.json")
        case = MAKERS[int(group)](device, device.type != "cuda")[int(index)]
        case.contestants["napkinmath"](case.make_inputs())
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def compile_all(
    cases: dict[str, Case], device: torch.device, seconds: float, workers: int
) -> dict[str, str]:
    """Compiles what the cases run, each in a process of its own; what failed, by place. A case that
    is not compiled in time compiles when it is timed."""
    until = time.monotonic() + seconds

    def one(place: str) -> str:
        command = [sys.executable, __file__, "--device", str(device), "--compile-only", place]
        command += ["--out", os.devnull]
        left = until - time.monotonic()
        if left <= 0:
            return "out of time"
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return "out of time"
        last = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        return last[0][:300] if run.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = dict(zip(cases, pool.map(one, cases), strict=True))
    return {place: reason for place, reason in found.items() if reason}


def make_cases(rows: Rows, device: torch.device, only: str) -> dict[str, Case]:
    """What is left to measure, by its place: the group that makes it, and its number there."""
    found: dict[str, Case] = {}
    for group, make in enumerate(MAKERS):
        with failures_as_rows(rows, make.__module__.rpartition(".")[2]):
            for index, case in enumerate(make(device, device.type != "cuda")):
                if only in case.op and not rows.is_measured(case.op, case.shape):
                    found[f"{group}:{index}"] = case
    return found


def measure(options: argparse.Namespace, clock: Clock, rows: Rows, facts: dict[str, Any]) -> bool:
    """All rows of a run; False if a kernel is wrong. Raises ContextLost."""
    device, tiny = clock.device, clock.device.type != "cuda"
    cases = make_cases(rows, device, options.only)
    if not tiny:
        began = time.monotonic()
        limit = COMPILING_SHARE * clock.seconds_left
        failed = compile_all(cases, device, limit, min(16, os.cpu_count() or 1))
        taken = round(time.monotonic() - began, 1)
        rows.add(op="compiling", shape="", contestant="", status="info", wall_s=taken, left=failed)
    ceilings = environment.measure_ceilings(clock, tiny)
    rows.add(op="ceilings", shape="", contestant="", status="info", **ceilings)
    right = correctness.check(rows, clock)
    archive = Archive(options.out, options.archive)
    archive.keep(at_once=True)
    takes_steps = options.only in goals.step_op()
    clock.reserved_s = STEPS_SHARE * options.budget if takes_steps else 0.0
    while cases:  # each is let go after it was timed
        case = cases.pop(next(iter(cases)))
        with failures_as_rows(rows, case.op):
            run_case(case, clock, rows, ceilings, SECONDS_A_TRIAL if tiny else SECONDS_A_CASE)
        del case
        archive.keep()
        if not tiny:
            torch.cuda.empty_cache()
    clock.reserved_s = 0.0
    if takes_steps:
        with failures_as_rows(rows, "steps"):
            steps.run_steps(clock, rows, device, tiny)
    rows.add(op="finished", shape="", contestant="", status="info")
    archive.keep(at_once=True)
    print(
        f"{facts['device']}; copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, matmul"
        f" {ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    return right


def go_on_anew(options: argparse.Namespace, seconds: float, reason: str) -> int:
    """The same command for the time that is left, in a process that the GPU still answers."""
    print(f"{reason} broke the GPU's context; a new process goes on without it", file=sys.stderr)
    command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device]
    command += ["--only", options.only, "--budget", f"{seconds:.0f}"]
    command += ["--archive", str(options.archive)] if options.archive else []
    return subprocess.run(command, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 2 without the device asked for; 1 if a kernel is wrong."""
    options = options_of(arguments)
    device = torch.device(options.device)
    if options.dry_run:
        lines = plan_lines(options.only)
        wrong = f"--only {options.only!r} is in no operation's name; --dry-run alone lists them"
        print("\n".join(lines) or wrong, file=sys.stdout if lines else sys.stderr)
        return 0 if lines else 2
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu tries the program out on tiny shapes", file=sys.stderr)
        return 2
    if options.compile_only is not None:
        compile_one(options.compile_only, device)
        return 0
    torch.manual_seed(0)
    clock = Clock(device, options.budget)
    facts = environment.describe(device)
    rows = Rows(
        options.out / "kernels.jsonl", {"device": facts["device"], "trial": device.type != "cuda"}
    )
    rows.add(
        op="environment",
        shape="",
        contestant="",
        status="info",
        **{key: value for key, value in facts.items() if key != "device"},
    )
    faulthandler.dump_traceback_later(options.budget + GRACE_S, exit=True)
    try:
        right = measure(options, clock, rows, facts)
    except ContextLost as error:
        rows.close()
        return go_on_anew(options, clock.seconds_left, str(error))
    finally:
        faulthandler.cancel_dump_traceback_later()
        rows.close()
    print("\n".join(table_lines(rows.rows)))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
