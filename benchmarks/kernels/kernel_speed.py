"""Times this project's kernels and their peers on one GPU, in turn, over rotated inputs.

    python benchmarks/kernels/kernel_speed.py --budget 150 --out benchmarks/results/h200

Writes kernels.jsonl row by row and prints a short table last. The same command goes on where an
earlier one stopped: what was measured on this device stays and is not timed again. `--device cpu` tries the program out
on tiny shapes; such rows are marked and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
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
    goals,
    loss,
    quantized,
    steps,
)
from kernel_rows.timing import Clock, Rows, run_case  # noqa: E402


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=float, default=150.0, help="seconds the whole run may take"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="substring of the ops to run")
    return parser.parse_args(arguments)


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
        elif row["status"] in ("failed", "wrong"):
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


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 2 without the device asked for; 1 if a kernel is wrong."""
    options = options_of(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu tries the program out on tiny shapes", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    tiny = device.type != "cuda"
    clock = Clock(device, options.budget)
    facts = environment.describe(device)
    rows = Rows(options.out / "kernels.jsonl", {"device": facts["device"], "trial": tiny})
    rows.add(
        op="environment",
        shape="",
        contestant="",
        status="info",
        **{key: value for key, value in facts.items() if key != "device"},
    )
    ceilings = environment.measure_ceilings(clock, tiny)
    rows.add(op="ceilings", shape="", contestant="", status="info", **ceilings)
    right = correctness.check(rows, device)
    makers = (
        quantized.dequantize_cases,
        quantized.qlora_cases,
        loss.cases,
        attention.cases,
        elementwise.cases,
    )
    for make in makers:
        with failures_as_rows(rows, make.__module__.rpartition(".")[2]):
            for case in make(device, tiny):
                if options.only in case.op and not rows.is_measured(case.op, case.shape):
                    run_case(case, clock, rows, ceilings, 0.02 if tiny else 1.6)
        if not tiny:
            torch.cuda.empty_cache()
    if options.only in goals.step_op():
        with failures_as_rows(rows, "steps"):
            steps.run_steps(clock, rows, device, tiny)
    rows.add(op="finished", shape="", contestant="", status="info")
    rows.close()
    print(
        f"{facts['device']}; copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, matmul"
        f" {ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    print("\n".join(table_lines(rows.rows)))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
