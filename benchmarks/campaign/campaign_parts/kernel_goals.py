"""The kernels' benchmark in the report: what is wrong or failed, and every goal with what was
measured."""

from __future__ import annotations

from pathlib import Path

from kernel_rows.goals import LOST

from campaign_parts.ledger import Row, read_rows

KERNELS = "kernels.jsonl"
FINISHED = "finished"
HEADS = ("| kernel | shape | goal | measured | |", "|---|---|---|---:|---|")


def is_finished(path: Path) -> bool:
    """Whether the benchmark came to its end; one that was stopped goes on where it was."""
    return any(row.get("op") == FINISHED for row in read_rows(path))


def kernel_lines(folder: Path) -> list[str]:
    """A section of the report; nothing where the kernels were not run."""
    rows = read_rows(folder / KERNELS)
    if not rows:
        return []
    goals = [row for row in rows if row.get("contestant") == "goal"]
    broken = [row for row in rows if row.get("status") in ("wrong", "failed", LOST)]
    right = sum(row.get("status") == "right" for row in rows)
    lines = [
        "",
        (
            f"Kernels on {rows[0].get('device', 'an unknown device')}: {right} looked at were"
            f" right, {len(broken)} rows wrong or failed."
        ),
    ]
    lines += [
        f"- {row['op']} {row.get('shape', '')} ({row.get('contestant', '')}): {row['status']}"
        f" {_why(row)}"
        for row in broken
    ]
    if not is_finished(folder / KERNELS):
        lines.append("- the benchmark was cut off; the same command goes on with it")
    return [*lines, "", *HEADS, *(_goal_line(row) for row in goals)] if goals else lines


def _why(row: Row) -> str:
    return str(row.get("reason", f"relative error {row.get('relative_error')}"))


def _goal_line(row: Row) -> str:
    value = f"{row['value']:.3f}" if "value" in row else "-"
    why = f": {row['reason']}" if row.get("reason") else ""
    return (
        f"| {row['op']} | {row.get('shape', '')} | {row['goal']} | {value} | {row['status']}{why} |"
    )
