"""Rows of the published tables, read by the meaning of their columns; nothing in a cell is taken on
trust.

Columns are those of benchmarks/data/memory.csv. An empty cell means that the source does not say. A
figure is in the unit of `mem_unit`: GiB is 2^30 bytes, GB is 10^9.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data"
ALLOCATED, RESERVED, DEVICE, SPEED = "allocated", "reserved", "device", "tokens_per_s"
_EMPTY = (
    "",
    "-",
    "--",
    "n/a",
    "n.a.",
    "na",
    "nan",
    "none",
    "null",
    "nil",
    "?",
    "unknown",
    "not stated",
    "not given",
    "not reported",
    "unspecified",
    "tbd",
    "\u2014",
    "\u2013",
)
_MEASURED = (
    "measured_peak_alloc_gb",
    "measured_peak_reserved_gb",
    "measured_unspecified_gb",
    "tokens_per_s_total",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "params_b",
)
# no table counts them so: above it, and without a unit, a figure is in MiB as nvidia-smi prints it
MANY_GIGABYTES = 2048
_WORDS = {"one": 1, "single": 1, "two": 2, "four": 4, "eight": 8}
_MEASURES = {
    ALLOCATED: "measured_peak_alloc_gb",
    RESERVED: "measured_peak_reserved_gb",
    DEVICE: "measured_unspecified_gb",
}


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
        """A positive whole number; `default` where the cell is empty, Unreadable where there is
        neither."""
        value = self.number(column)
        if value is None:
            if default is None:
                raise Unreadable(f"{column} is not given")
            return default
        if value < 1 or value != int(value):
            raise Unreadable(f"{column} {self[column]!r} is not a positive whole number")
        return int(value)

    def number(self, column: str) -> float | None:
        """The finite number that a cell states, whatever stands around it ("~12.3 GiB", "4k",
        "bs=4", "1 x A100"); None where it is empty.

        Of a span ("30-32 GB", "512 to 1024", "up to 4096") a measurement is its middle, a size its
        end, which sets the peak.
        """
        text = self[column].strip()
        if text.lower() in _EMPTY:
            return None
        try:
            low, value = read_span(text)
            value = (low + value) / 2 if column in _MEASURED else value
        except (ValueError, OverflowError):
            raise Unreadable(f"{column} {text!r} is not a number") from None
        if not math.isfinite(value):
            raise Unreadable(f"{column} {text!r} is not a finite number")
        return value

    def states(self, column: str) -> bool:
        """Whether the cell says anything."""
        return self[column].strip().lower() not in _EMPTY

    def whole_or(self, column: str, default: int, assumed: dict[str, str]) -> int:
        """A positive whole number of a cell that matters little: `default`, said in `assumed`,
        where it cannot be read."""
        try:
            return self.whole(column, default)
        except Unreadable as error:
            assumed[column] = f"{column} {default}: {error}"
            return default

    def words(self, *columns: str) -> str:
        """Cells joined in lower case, to look for words in."""
        return " ".join(self[c] for c in columns).lower()

    @property
    def bytes_per_unit(self) -> int:
        """Bytes of one unit of the row's memory figures: 2^30 where the source says GiB, else 10^9;
        MiB and MB where it starts so."""
        return unit_bytes(self["mem_unit"]) or 10**9

    @property
    def unit_is_sure(self) -> bool:
        """Whether the table says what its unit of memory is: GiB or MiB, or GB with 1e9 or bytes
        beside it."""
        text = self["mem_unit"].lower()
        return bool(re.search(r"[gm]ib|1e9|10\^9|bytes", text)) and "not stated" not in text

    def measured(self) -> Iterator[tuple[str, float]]:
        """(quantity, figure) for every measurement of memory in the row, in the row's unit;
        Unreadable only where none can be read."""
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
                own = _unit_after_number(self[column]) or (
                    1 << 20 if not unit_bytes(self["mem_unit"]) and value > MANY_GIGABYTES else 0
                )
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


def read_span(text: str) -> tuple[float, float]:
    """(low, high) of "512-1024", "30 to 32 GB", "24.1\u201326"; equal for a number alone;
    ValueError where there is none."""
    plain = text.strip().lower()
    found = re.search(
        r"([-+]?[\d.,_]+\s*[km]?)\s*(?:[a-z]*\s*)(?:-|\u2013|\u2014|~|to|and)\s*([\d.,_]+\s*[km]?.*)$",
        plain,
    )
    if found and not re.match(r"[-+]?[\d.]+e[-+]?\d", plain[found.start() :]):
        low, high = read_number(found[1]), read_number(found[2])
        if low <= high:
            return low, high
    value = read_number(text)
    return value, value


def read_number(text: str) -> float:
    """The first number in a text, "k" and "m" after it multiplying a count; ValueError where there
    is none."""
    plain = re.sub(r"(?<=\d)[,_'\u202f\u00a0 ](?=\d{3}(?!\d))", "", text.strip().lower())
    plain = re.sub(r"(?<=\d),(?=\d{1,2}(?!\d))", ".", plain)  # a decimal comma
    if re.fullmatch(r"[-+]?(nan|inf|infinity)", plain):
        return float(plain)
    if plain in _WORDS:
        return float(_WORDS[plain])
    found = re.search(
        r"(?<![a-z0-9.])(?:[a-z_"
        r" ]*[=:]\s*)?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(k(?!i?b)(?![a-z])|m(?![a-z]))?",
        plain,
    )
    if found is None:
        found = re.search(r"^(?:r|bs|mbs|ga|seq|ctx|rank|batch|len|x)[ _-]?([0-9]+)()$", plain)
    if found is None:
        raise ValueError(text)
    scale = {"k": 1024.0, "m": 1e6}.get(found[2] or "", 1.0)
    value = float(found[1])
    return value * (1000.0 if scale == 1024.0 and value != int(value) else scale)


def _unit_after_number(text: str) -> int:
    found = re.search(r"\d\s*([a-z]+)", text.lower())
    return unit_bytes(found[1]) if found else 0


def unit_bytes(text: str) -> int:
    """Bytes of the unit that a text begins with (GiB, GB, MiB, MB, G); 0 where it names none."""
    found = re.match(r"\s*\(?([kmgt]i?)b?\b", text.lower())
    return (
        {
            "g": 10**9,
            "gi": 1 << 30,
            "m": 10**6,
            "mi": 1 << 20,
            "k": 1000,
            "ki": 1024,
            "t": 10**12,
            "ti": 1 << 40,
        }[found[1]]
        if found
        else 0
    )


def read_rows(path: Path) -> list[Row]:
    """Every row of a table; columns by their names in any order and case, unknown ones ignored; a
    row without an id gets its line's.

    Bytes that are no UTF-8 and NULs are replaced: one bad cell is no reason to lose a table.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = (line.replace("\0", "") for line in file)
        first = next(lines, "")
        table = csv.DictReader(
            itertools.chain((first,), lines), delimiter=max(",;\t", key=first.count)
        )
        rows: list[Row] = []
        for line, cells in enumerate(table, start=2):
            kept = {
                _column(k): (v or "").strip()
                for k, v in cells.items()
                if k is not None and not isinstance(v, list)
            }
            if not any(kept.values()):
                continue
            kept["row_id"] = kept.get("row_id", "") or f"{path.name}:{line}"
            rows.append(Row(kept))
        return rows


def _column(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())
