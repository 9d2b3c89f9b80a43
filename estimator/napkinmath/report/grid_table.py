"""The rows of a sweep as a table: aligned on a terminal, tab-separated where the output is read by
a program."""

from __future__ import annotations

from napkinmath.base.units import GIB
from napkinmath.planning.grid import MONEY
from napkinmath.report.columns import print_sheet
from napkinmath.report.formats import Sheet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.planning.grid import Grid


# What a narrow table can do without: the other figures of memory lead to the device's.
_LEAST = ("peak in", "requested GiB", "allocated GiB", "reserved GiB", "s a step")


def print_grid(grid: Grid, rows: Sequence[tuple[Any, ...]]) -> None:
    """Prints the sheet."""
    print_sheet(grid_sheet(grid, rows))


def grid_sheet(grid: Grid, rows: Sequence[tuple[Any, ...]]) -> Sheet:
    """Rows with bytes in GiB; columns that say nothing in any row are left out."""
    shown = [i for i in range(len(grid.names)) if any(row[i] is not None for row in rows)]
    heads = [_head(grid.names[i]) for i in shown]
    cells = tuple(tuple(_cell(grid.names[i], row[i]) for i in shown) for row in rows)
    texts = {"verdict", "peak_phase", *grid.keys} - {"bs", "ctx", "rank", "grad_accum"}
    numbers = [h for h, i in zip(heads, shown, strict=True) if grid.names[i] not in texts]
    return Sheet(heads=tuple(heads), rows=cells, right=tuple(numbers), least=_LEAST)


def _head(name: str) -> str:
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} GiB"
    return {
        "tokens_per_s": "tokens/s",
        "seconds": "s a step",
        "peak_phase": "peak in",
        "grad_accum": "accum",
        "gpu_hours_per_billion": "GPU-hours for 1.00B",
        "price_per_billion": "money",
    }.get(name, name)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / GIB:.2f}"
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    if name in MONEY:
        return f"{value:,.2f}"
    return f"{value:,.3f}" if name == "seconds" else str(value)
