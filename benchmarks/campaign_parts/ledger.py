"""Rows written as they are made, one JSON object a line, and read again by a run that goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """A JSONL file: ``add`` appends a row and makes sure that it is on the disk; a line cut off by a crash is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)

    def add(self, row: Row) -> Row:
        """Append ``row``."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        return row

    def names(self, *statuses: str) -> set[str]:
        """Cases that have a row, of one of the statuses if any are named."""
        return {row["case"] for row in self.rows if "case" in row and (not statuses or row.get("status") in statuses)}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    found: list[Row] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                found.append(row)
    return found


def _end_last_line(path: Path) -> None:
    """A line that was cut off gets its end, so that the next row is a line of its own."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
