"""Writes the kernels' goals, their floors on an H200 and what was measured into README.md and
docs/kernels.md; a test holds the pages to it.

    python benchmarks/kernels/kernel_table.py [benchmarks/results/h200/kernels.jsonl ...]

Without a file every committed `benchmarks/results/*/kernels.jsonl` is read. What no GPU has run
says "not measured". README.md has a line an operation, with the floor of the first size and the
worst value of all; docs/kernels.md has every size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "benchmarks" / "kernels")]

from kernel_rows.goals import Aim, Goal, aims  # noqa: E402

NOT_MEASURED = "not measured"
PAGES = (ROOT / "README.md", ROOT / "docs" / "kernels.md")
BEGIN, END = (
    "<!-- kernel goals: python benchmarks/kernels/kernel_table.py -->\n",
    "<!-- end of kernel goals -->\n",
)
HEADS = ("| operation | size | goal | floor on an H200 | measured |", "|---|---|---|---:|---|")

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


def _cells(aim: Aim, size: str, goals: str, measured: str) -> str:
    return f"| {aim.op} | {size} | {goals} | {floor_text(aim.floor_s)} | {measured} |"


def every_size(verdicts: Verdicts) -> list[str]:
    """A line for each goal at each size."""
    return [
        _cells(
            aim,
            aim.shape,
            goal.text,
            measured_text(goal, verdicts.get((aim.op, aim.shape, against), [])),
        )
        for aim in aims()
        for against, goal in aim.goals.items()
    ]


def every_operation(verdicts: Verdicts) -> list[str]:
    """A line for each operation and set of goals, at the first of the sizes that share it; the
    worst value of them all."""
    alike: dict[tuple[str, tuple[str, ...]], list[Aim]] = {}
    for aim in aims():
        alike.setdefault((aim.op, tuple(goal.text for goal in aim.goals.values())), []).append(aim)
    lines = []
    for (_, texts), group in alike.items():
        found = [
            measured_text(
                goal,
                [row for aim in group for row in verdicts.get((aim.op, aim.shape, against), [])],
            )
            for against, goal in group[0].goals.items()
        ]
        size = group[0].shape + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        measured = NOT_MEASURED if set(found) == {NOT_MEASURED} else "<br>".join(found)
        lines.append(_cells(group[0], size, "<br>".join(texts), measured))
    return lines


def tables(paths: Iterable[Path]) -> dict[Path, str]:
    """The text between the marks of each page."""
    verdicts = verdicts_of(paths)
    lines = (every_operation(verdicts), every_size(verdicts))
    return {
        page: "".join(f"{line}\n" for line in (*HEADS, *found))
        for page, found in zip(PAGES, lines, strict=True)
    }


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
    """Rewrites both pages."""
    for page, table in tables([Path(name) for name in arguments] or recorded()).items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
