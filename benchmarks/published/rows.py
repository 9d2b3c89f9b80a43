"""Rows of the published tables, read by the meaning of their columns; nothing in a cell is taken on trust.

Columns are those of benchmarks/data/memory.csv. An empty cell means that the source does not say. A figure is in the unit of
`mem_unit`: GiB is 2^30 bytes, GB is 10^9.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
ALLOCATED, RESERVED, DEVICE, SPEED = "allocated", "reserved", "device", "tokens_per_s"
_MEASURES = {ALLOCATED: "measured_peak_alloc_gb", RESERVED: "measured_peak_reserved_gb", DEVICE: "measured_unspecified_gb"}


class Unreadable(Exception):
    """A cell that is needed and cannot be understood; the message names it."""


@dataclass(frozen=True)
class Row:
    """One published run: its cells as text."""

    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "")

    @property
    def row_id(self) -> str:
        return self["row_id"]

    @property
    def source(self) -> str:
        """Who published it: the repository, before the file."""
        return self["source"].partition(":")[0].strip() or "unnamed"

    def whole(self, column: str, default: int | None = None) -> int:
        """A positive whole number; `default` where the cell is empty, Unreadable where there is neither."""
        value = self.number(column)
        if value is None:
            if default is None:
                raise Unreadable(f"{column} is not given")
            return default
        if value < 1 or value != int(value):
            raise Unreadable(f"{column} {self[column]!r} is not a positive whole number")
        return int(value)

    def number(self, column: str) -> float | None:
        """A finite number, or None where the cell is empty."""
        text = re.sub(r"\s*(gib|gb|g)$", "", self[column].strip().replace(",", ""), flags=re.IGNORECASE)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise Unreadable(f"{column} {self[column]!r} is not a number") from None
        if not math.isfinite(value):
            raise Unreadable(f"{column} {self[column]!r} is not a finite number")
        return value

    def words(self, *columns: str) -> str:
        """Cells joined in lower case, to look for words in."""
        return " ".join(self[c] for c in columns).lower()

    @property
    def bytes_per_unit(self) -> int:
        """2^30 where the source says GiB or MiB, else 10^9."""
        unit = self["mem_unit"].lower()
        return 1 << 30 if "gib" in unit or "mib" in unit else 10**9

    def measured(self) -> Iterator[tuple[str, float]]:
        """(quantity, figure) for every measurement of memory in the row, in the row's unit; Unreadable only where none can be read."""
        wrong: Unreadable | None = None
        found = False
        for quantity, column in _MEASURES.items():
            try:
                value = self.number(column)
            except Unreadable as error:
                wrong = error
                continue
            if value is not None and value > 0:
                found = True
                yield quantity, value
        if wrong is not None and not found:
            raise wrong

    @property
    def status(self) -> str:
        """'ok', 'OOM' or 'max_fit'."""
        text = self["status"].strip().lower()
        return "OOM" if text == "oom" else "max_fit" if text.startswith("max") else "ok"


def read_rows(path: Path) -> list[Row]:
    """Every row of a table; a row without an id is given one from its line."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows: list[Row] = []
        for line, cells in enumerate(csv.DictReader(file), start=2):
            kept = {str(k): (v or "") for k, v in cells.items() if k is not None and not isinstance(v, list)}
            kept["row_id"] = kept.get("row_id", "").strip() or f"{path.name}:{line}"
            rows.append(Row(kept))
        return rows
