"""The rows of a sweep in a file: .csv, .jsonl or .parquet, whole or not at all."""

from __future__ import annotations

import csv
import json
import os

from napkinmath.base.errors import InputError, shown
from napkinmath.base.whole_file import refuse_existing, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, BinaryIO

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
    counted = _Counted(rows)
    if suffix == ".parquet":
        write_whole(path, _parquet(grid, counted), force=force)
    else:
        write = {".csv": _csv, ".jsonl": _jsonl}[suffix]
        write_whole(path, lambda file: write(grid, counted, file), force=force)
    return counted.count


class _Counted:
    """Rows, and how many of them were taken."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self._rows, self.count = iter(rows), 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> tuple[Any, ...]:
        row = next(self._rows)
        self.count += 1
        return row


class _Encoded:
    """What csv writes text into, as UTF-8."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Writes it; returns the number of its bytes."""
        return self._file.write(text.encode())


def _csv(grid: Grid, rows: Iterable[tuple[Any, ...]], file: BinaryIO) -> None:
    writer = csv.writer(_Encoded(file))
    writer.writerow(grid.names)
    writer.writerows(rows)


def _jsonl(grid: Grid, rows: Iterable[tuple[Any, ...]], file: BinaryIO) -> None:
    for row in rows:
        file.write((json.dumps(dict(zip(grid.names, row, strict=True))) + "\n").encode())


def _parquet(grid: Grid, rows: Iterable[tuple[Any, ...]]) -> bytes:
    try:
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        table = pd.DataFrame(rows, columns=list(grid.names))
        return table.to_parquet(None, index=False)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    except ImportError:
        raise InputError(
            "Parquet needs pandas and pyarrow: pip install pandas pyarrow; .csv and .jsonl need"
            " neither"
        ) from None
