"""The rows of a sweep in a file: .csv, .jsonl or .parquet, whole or not at all."""

from __future__ import annotations

import csv
import json
import os

from napkinmath.base.errors import InputError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from napkinmath.planning.grid import Grid

SUFFIXES = (".csv", ".jsonl", ".parquet")


def write_grid(
    grid: Grid, rows: Iterable[tuple[Any, ...]], path: str, *, force: bool = False
) -> int:
    """Writes every row and returns their number; raises InputError for an unknown ending or a file
    that is there."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise InputError(f"--out {shown(path)} has no known ending; use {', '.join(SUFFIXES)}")
    refuse_existing(path, force)
    temporary = f"{path}.{os.getpid()}.part"
    try:
        count = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}[suffix](
            grid, rows, temporary
        )
        os.replace(temporary, path)
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
    return count


def refuse_existing(path: str, force: bool) -> None:
    """Raises InputError for a file that is there, without `force`, and for a folder."""
    if os.path.isdir(path):
        raise InputError(f"{shown(path)} is a folder; name a file in it")
    if os.path.lexists(path) and not force:
        raise InputError(f"{shown(path)} exists; add --force to replace it, or name another file")


def _csv(grid: Grid, rows: Iterable[tuple[Any, ...]], path: str) -> int:
    count = 0
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(grid.names)
        for row in rows:
            writer.writerow(row)
            count += 1
    return count


def _jsonl(grid: Grid, rows: Iterable[tuple[Any, ...]], path: str) -> int:
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(dict(zip(grid.names, row, strict=True))) + "\n")
            count += 1
    return count


def _parquet(grid: Grid, rows: Iterable[tuple[Any, ...]], path: str) -> int:
    try:
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        table = pd.DataFrame(rows, columns=list(grid.names))
        table.to_parquet(path, index=False)  # pyright: ignore[reportUnknownMemberType]
    except ImportError:
        raise InputError(
            "Parquet needs pandas and pyarrow: pip install pandas pyarrow; .csv and .jsonl need"
            " neither"
        ) from None
    return len(table)
