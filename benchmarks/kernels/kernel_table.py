"""Writes the kernels' goals, their floors on an H200, the share of the floor that their machine code
leaves and what was measured into docs/kernels.md; a test holds the page to it.

    python benchmarks/kernels/kernel_table.py [benchmarks/results/h200/kernels.jsonl ...]

Without a file every committed `benchmarks/results/*/kernels.jsonl` is read. What no GPU has run
says "not measured".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("kernels", "estimator", "benchmarks/kernels")]

from kernel_rows.goals import Aim, Goal, aims  # noqa: E402
from predicted import fractions  # noqa: E402

NOT_MEASURED = "not measured"
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = (
    "<!-- kernel goals: python benchmarks/kernels/kernel_table.py -->\n",
    "<!-- end of kernel goals -->\n",
)
HEADS = (
    "| operation | size | goal | floor on an H200 | predicted share of it | measured |",
    "|---|---|---|---:|---|---|",
)
GATE = ROOT / "benchmarks" / "results" / "compile_gate.csv"

Row = dict[str, Any]
Verdicts = dict[tuple[str, str, str], list[Row]]


def verdicts_of(paths: Iterable[Path]) -> Verdicts:
    """Rows of goals by operation, size and contestant; those of a trial on a CPU say nothing and
    are left out."""
    found: Verdicts = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("contestant") == "goal" and "value" in row and not row.get("trial"):
                found.setdefault((row["op"], row["shape"], row["against"]), []).append(row)
    return found


def floor_text(seconds: float) -> str:
    """Microseconds to three digits; a dash where none is stated."""
    if not seconds:
        return "-"
    digits = max(0, 2 - len(str(int(seconds * 1e6))) + 1)
    return f"{seconds * 1e6:,.{digits}f} us"


def measured_text(goal: Goal, rows: list[Row]) -> str:
    """The value furthest from the goal on each device, and whether it is met."""
    by_device: dict[str, list[float]] = {}
    for row in rows:
        by_device.setdefault(row["device"], []).append(row["value"])
    worst = {device: (max if goal.at_most else min)(values) for device, values in by_device.items()}
    found = [
        f"{value:.3f} ({'met' if goal.is_met(value) else 'missed'}, {device})"
        for device, value in worst.items()
    ]
    return "; ".join(found) or NOT_MEASURED


def _cells(aim: Aim, goals: str, predicted: str, measured: str) -> str:
    floor = floor_text(aim.floor_s)
    return f"| {aim.op} | {aim.shape} | {goals} | {floor} | {predicted} | {measured} |"


def every_size(verdicts: Verdicts) -> list[str]:
    """A line for each goal at each size."""
    predicted = fractions(GATE, {(aim.op, aim.shape): aim.floor_s for aim in aims()})
    return [
        _cells(
            aim,
            goal.text,
            predicted.get((aim.op, aim.shape), "-"),
            measured_text(goal, verdicts.get((aim.op, aim.shape, against), [])),
        )
        for aim in aims()
        for against, goal in aim.goals.items()
    ]


def table_of(paths: Iterable[Path]) -> str:
    """The text between the marks of the page."""
    return "".join(f"{line}\n" for line in (*HEADS, *every_size(verdicts_of(paths))))


def with_table(page: str, table: str) -> str:
    """The page with its table in place of the one it has; ValueError without the marks."""
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"no table between {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def recorded() -> list[Path]:
    """Committed results, in the order of their names."""
    return sorted((ROOT / "benchmarks" / "results").glob("*/kernels.jsonl"))


def main(arguments: list[str]) -> int:
    """Rewrites the page."""
    table = table_of([Path(name) for name in arguments] or recorded())
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
