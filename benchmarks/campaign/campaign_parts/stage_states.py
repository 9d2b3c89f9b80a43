"""What became of the campaign's stages: begun, done or failed, kept on the disk as it happens."""

from __future__ import annotations

from pathlib import Path

from campaign_parts.ledger import Row, read_rows

STAGES = "stages.jsonl"
BEGUN, DONE, FAILED = "begun", "done", "failed"


def stage_lines(folder: Path) -> list[str]:
    """A line for each stage whose last state is not done: why it failed, or that it was cut off,
    as by a kill."""
    last: dict[str, Row] = {row["case"]: row for row in read_rows(folder / STAGES)}
    found: list[str] = []
    for name, row in last.items():
        if row["status"] == FAILED:
            found.append(f"- stage {name} failed: {row['reason']}")
        elif row["status"] == BEGUN:
            found.append(f"- stage {name} was cut off; the same command goes on with it")
    return ["", *found] if found else []
