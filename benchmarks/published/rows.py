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
_EMPTY = ("", "-", "--", "n/a", "na", "none", "null", "?", "unknown", "not stated", "tbd", "\u2014")
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
        """The finite number that a cell states, whatever stands around it ("~12.3 GiB", "4k", "bs=4", "1 x A100"); None where it is empty."""
        text = self[column].strip()
        if text.lower() in _EMPTY:
            return None
        try:
            value = read_number(text)
        except (ValueError, OverflowError):
            raise Unreadable(f"{column} {text!r} is not a number") from None
        if not math.isfinite(value):
            raise Unreadable(f"{column} {text!r} is not a finite number")
        return value

    def words(self, *columns: str) -> str:
        """Cells joined in lower case, to look for words in."""
        return " ".join(self[c] for c in columns).lower()

    @property
    def bytes_per_unit(self) -> int:
        """Bytes of one unit of the row's memory figures: 2^30 where the source says GiB, else 10^9; MiB and MB where it starts so."""
        return unit_bytes(self["mem_unit"]) or 10**9

    @property
    def unit_is_sure(self) -> bool:
        """Whether the table says what its unit of memory is: GiB or MiB, or GB with 1e9 or bytes beside it."""
        text = self["mem_unit"].lower()
        return bool(re.search(r"[gm]ib|1e9|10\^9|bytes", text)) and "not stated" not in text

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
                own = unit_bytes(re.sub(r"^[^a-zA-Z]*", "", self[column]))
                yield quantity, value * own / self.bytes_per_unit if own else value
        if wrong is not None and not found:
            raise wrong

    @property
    def status(self) -> str:
        """'ok', 'OOM' or 'max_fit'."""
        text = self["status"].strip().lower()
        if re.search(r"\boom\b|out[ -]of[ -]memory|(does|did) ?n[o']t fit|\bfail", text):
            return "OOM"
        return "max_fit" if text.startswith("max") else "ok"


def read_number(text: str) -> float:
    """The one number in a text, "k" and "m" after it multiplying a count; ValueError where there is none, or a span of two."""
    plain = re.sub(r"(?<=\d)[,_\u202f\u00a0](?=\d{3}(?!\d))", "", text.strip().lower())
    if re.fullmatch(r"[-+]?(nan|inf|infinity)", plain):
        return float(plain)
    found = re.search(
        r"(?<![a-z0-9.])(?:[a-z_ ]*[=:]\s*)?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(k(?!i?b)(?![a-z])|m(?![a-z]))?", plain
    )
    if found is None:
        found = re.search(r"^(?:r|bs|ga|seq|ctx|rank|batch)([0-9]+)()$", plain)
    if found is None or re.match(r"\s*(?:-|\u2013|to)\s*\d", plain[found.end() :]):
        raise ValueError(text)
    scale = {"k": 1024.0, "m": 1e6}.get(found[2] or "", 1.0)
    value = float(found[1])
    return value * (1000.0 if scale == 1024.0 and value != int(value) else scale)


def unit_bytes(text: str) -> int:
    """Bytes of the unit that a text begins with (GiB, GB, MiB, MB, G); 0 where it names none."""
    found = re.match(r"\s*\(?([kmgt]i?)b?\b", text.lower())
    return (
        {"g": 10**9, "gi": 1 << 30, "m": 10**6, "mi": 1 << 20, "k": 1000, "ki": 1024, "t": 10**12, "ti": 1 << 40}[found[1]] if found else 0
    )


def read_rows(path: Path) -> list[Row]:
    """Every row of a table; a row without an id is given one from its line."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows: list[Row] = []
        for line, cells in enumerate(csv.DictReader(file), start=2):
            kept = {str(k).strip().lower(): (v or "") for k, v in cells.items() if k is not None and not isinstance(v, list)}
            kept["row_id"] = kept.get("row_id", "").strip() or f"{path.name}:{line}"
            rows.append(Row(kept))
        return rows
