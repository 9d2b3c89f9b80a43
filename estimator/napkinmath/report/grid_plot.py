"""A sweep drawn: a table of two numbers that vary, coloured by verdict, with the border where the
memory ends; lines of one number. SVG needs nothing more, PNG needs matplotlib."""

from __future__ import annotations

from itertools import pairwise
from math import log2

from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, parse_count
from napkinmath.inputs.option_table import COUNTS
from napkinmath.report.drawing import FAINT, GRID_LINE, INK, Canvas, check_file
from napkinmath.report.picture import number, ticks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from napkinmath.planning.grid import Grid

    Rows = Sequence[tuple[Any, ...]]

WIDTH, HEIGHT = 920, 580
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 92, 66
SHOWN = ("memory", "tokens/s")
MOST_NUMBERS, MOST_LINES = 400, 24
_TITLES = {
    "bs": "batch",
    "ctx": "sequence length",
    "rank": "LoRA rank",
    "grad_accum": "gradient accumulation",
    "gpus": "GPUs",
}
_FILLS = {
    Verdict.FITS.value: "#bfdcf3",
    Verdict.UNKNOWN.value: "#f2e3ad",
    Verdict.DOES_NOT_FIT.value: "#f3c3a5",
}
_WORDS = {
    Verdict.FITS.value: "fits",
    Verdict.UNKNOWN.value: "perhaps: the range straddles what the GPU offers",
    Verdict.DOES_NOT_FIT.value: "does not fit",
}
_PLAIN, _REFUSED = "#e9eef2", "#f7f8f9"
# Capacities that are drawn in where no GPU is named: box sizes, of which the driver and the CUDA
# context keep about 0.8 GiB.
_CARDS = (8, 16, 24, 48, 80, 141, 192)
_KEPT_GIB = 0.8
_COLORS = (
    "#3b6fb6",
    "#c8781e",
    "#3f8f4f",
    "#a04a9c",
    "#b5362c",
    "#4a9aa8",
    "#7d6a2f",
    "#5b3a8c",
)
_DASHES = ("", "7 4", "2 3")


def check_plot(grid: Grid, path: str, *, show: str = "memory", force: bool = False) -> None:
    """Raises InputError where the sweep could not be drawn into the file; asked before anything is
    priced."""
    check_file(path, force=force)
    if show not in SHOWN:
        raise InputError(f"--show {shown(show)} is unknown; use {' or '.join(SHOWN)}")
    keys = _numeric(grid)
    if not keys:
        raise InputError("--plot needs a number that varies; give e.g. --bs 1..64 or --ctx 1k..64k")
    lines = 1
    for key in grid.keys:
        if key != keys[-1] and not (key == "gpu" and show == "memory"):
            lines *= len(grid.values[key])
    if not _is_table(grid, keys) and lines > MOST_LINES:
        raise InputError(
            f"{lines} lines cannot be distinguished; vary two numbers for a table of verdicts, or"
            " fewer options"
        )


def write_plot(
    grid: Grid, rows: Rows, path: str, *, show: str = "memory", force: bool = False
) -> None:
    """Draws the rows into a .svg or .png; raises InputError as `check_plot` does, and where speeds
    are asked for that are not known."""
    check_plot(grid, path, show=show, force=force)
    grid_drawing(grid, rows, show=show).write(path, force=force)


def grid_drawing(grid: Grid, rows: Rows, *, show: str = "memory") -> Canvas:
    """The drawing of a sweep's rows."""
    keys = _numeric(grid)
    value, label = _value(grid, rows, show)
    drawing = Canvas(WIDTH, HEIGHT, label, _cut(grid.summary, 140))
    if _is_table(grid, keys):
        pair = ("ctx", *(k for k in keys if k != "ctx"))[:2] if "ctx" in keys else keys[:2]
        _Table(grid, rows, (pair[0], pair[1]), value).draw(drawing)
    else:
        _draw_lines(drawing, _lines_of(grid, rows, keys[-1], value, show), grid, show)
    return drawing


def _is_table(grid: Grid, keys: Sequence[str]) -> bool:
    return len(keys) > 1 and len(grid.keys) == 2


def _numeric(grid: Grid) -> tuple[str, ...]:
    """The options that vary and are numbers."""
    return tuple(key for key in grid.keys if key in COUNTS)


def _number(value: object) -> int | None:
    """A value of such an option; None where a combination has none (a rank without adapters)."""
    if value is None or isinstance(value, int):
        return value
    return parse_count(str(value), what="a number that varies")


def _value(grid: Grid, rows: Rows, show: str) -> tuple[list[float], str]:
    """One number a row, in GiB or tokens/s, and its name."""
    if show == "tokens/s":
        index = grid.names.index("tokens_per_s")
        if any(row[index] is None for row in rows):
            raise InputError("--show tokens/s needs a GPU with known speeds; add --gpu NAME")
        return [row[index] for row in rows], "Tokens/s"
    name, what = (
        ("device_bytes", "Peak memory on the device, GiB")
        if "device_bytes" in grid.names
        else ("requested_bytes", "Peak memory that tensors request, GiB")
    )
    index = grid.names.index(name)
    return [row[index] / GIB for row in rows], what


# ---------------------------------------------------------------- two numbers


class _Cell(Record):
    """One job: what is written in it, and its verdict, None where no GPU is named."""

    value: float
    verdict: str | None


class _Table:
    """Cells by two numbers, the first from left to right, the second from below."""

    def __init__(
        self, grid: Grid, rows: Rows, keys: tuple[str, str], value: Sequence[float]
    ) -> None:
        self.keys, self.grid = keys, grid
        at = [grid.names.index(key) for key in keys]
        verdict = grid.names.index("verdict")
        self.cells: dict[tuple[int, int], _Cell] = {}
        for row, own in zip(rows, value, strict=True):
            x, y = (_number(row[index]) for index in at)
            if x is not None and y is not None:
                self.cells[x, y] = _Cell(value=own, verdict=row[verdict])
        self.xs, self.ys = (sorted({place[axis] for place in self.cells}) for axis in (0, 1))
        self.wide = (WIDTH - LEFT - RIGHT) / len(self.xs)
        self.high = (HEIGHT - TOP - BOTTOM - 30) / len(self.ys)

    def draw(self, drawing: Canvas) -> None:
        """Cells, their numbers, the borders between verdicts, axes and legend."""
        for x, left in self._places():
            for y, top in self._rows():
                self._draw_cell(drawing, self.cells.get((x, y)), left, top)
        if any(cell.verdict is not None for cell in self.cells.values()):
            fits, no = Verdict.FITS.value, Verdict.DOES_NOT_FIT.value
            self._border(drawing, lambda cell: cell.verdict == fits, 3.0, "")
            self._border(drawing, lambda cell: cell.verdict != no, 1.6, "5 3")
            self._legend(drawing)
        else:
            self._draw_cards(drawing)
        self._axes(drawing)

    def _places(self) -> list[tuple[int, float]]:
        return [(x, LEFT + i * self.wide) for i, x in enumerate(self.xs)]

    def _rows(self) -> list[tuple[int, float]]:
        bottom = HEIGHT - BOTTOM - 30
        return [(y, bottom - (i + 1) * self.high) for i, y in enumerate(self.ys)]

    def _draw_cell(self, drawing: Canvas, cell: _Cell | None, left: float, top: float) -> None:
        fill = _REFUSED if cell is None else _FILLS.get(cell.verdict or "", _PLAIN)
        gap = 1 if min(self.wide, self.high) > 12 else 0
        drawing.rect(left, top, self.wide - gap, self.high - gap, fill)
        if cell is None or len(self.xs) * len(self.ys) > MOST_NUMBERS:
            return
        text = f"{cell.value:,.0f}" if cell.value >= 1000 else f"{cell.value:.3g}"
        size = min(13.0, 0.6 * self.high, 1.5 * self.wide / max(3, len(text)))
        if size >= 6:
            middle = left + self.wide / 2, top + self.high / 2 + 0.35 * size
            drawing.text(*middle, text, size=size, anchor="middle")

    def _border(
        self, drawing: Canvas, inside: Callable[[_Cell], bool], width: float, dash: str
    ) -> None:
        """The line between cells that are inside and those that are not."""
        for segment in self._edges(inside):
            drawing.line(segment, INK, width=width, dash=dash)

    def _edges(
        self, inside: Callable[[_Cell], bool]
    ) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Sides that a cell inside has in common with one that is not: of a job that was refused
        nothing is known, so it has no border."""
        found: list[tuple[tuple[float, float], tuple[float, float]]] = []
        places, rows = self._places(), self._rows()

        def differs(one: tuple[int, int], other: tuple[int, int]) -> bool:
            a, b = self.cells.get(one), self.cells.get(other)
            return a is not None and b is not None and inside(a) != inside(b)

        for (x, _), (right, left) in pairwise(places):
            for y, top in rows:
                if differs((x, y), (right, y)):
                    found.append(((left, top), (left, top + self.high)))
        for (y, top), (above, _) in pairwise(rows):
            for x, left in places:
                if differs((x, y), (x, above)):
                    found.append(((left, top), (left + self.wide, top)))
        return found

    def _draw_cards(self, drawing: Canvas) -> None:
        """Borders at which cards of the usual sizes are full, where no GPU is named."""
        if "device_bytes" not in self.grid.names and "requested_bytes" not in self.grid.names:
            return
        drawn: list[str] = []
        for card in _CARDS:
            edges = self._edges(lambda cell, room=card: cell.value <= room)
            for segment in edges:
                drawing.line(segment, INK, width=2.0)
            if edges:
                drawn.append(f"{card} GiB")
                (x, y), _ = min(edges, key=lambda edge: edge[0][1])
                drawing.text(x + 2, y - 4, f"{card} GiB", size=9.5, bold=True, halo=True)
        if drawn:
            drawing.text(
                LEFT, HEIGHT - 12, f"lines: where cards of {', '.join(drawn)} are full", color=FAINT
            )

    def _legend(self, drawing: Canvas) -> None:
        x = float(LEFT)
        for verdict, fill in _FILLS.items():
            drawing.rect(x, HEIGHT - 25, 14, 14, fill)
            drawing.text(x + 20, HEIGHT - 13, _WORDS[verdict], color=FAINT)
            x += 34 + 6.4 * len(_WORDS[verdict])
        gpus = ", ".join(self.grid.hardware)
        drawing.text(WIDTH - RIGHT, HEIGHT - 13, gpus, color=FAINT, anchor="end")

    def _axes(self, drawing: Canvas) -> None:
        bottom = HEIGHT - BOTTOM - 30
        every = max(1, -(-len(self.xs) // 14))
        for x, left in self._places()[::every]:
            drawing.text(left + self.wide / 2, bottom + 18, _short(x), anchor="middle", color=FAINT)
        every = max(1, -(-len(self.ys) // 20))
        for y, top in self._rows()[::every]:
            middle = top + self.high / 2 + 4
            drawing.text(LEFT - 8, middle, _short(y), anchor="end", color=FAINT)
        _name_axes(drawing, *(_TITLES.get(key, key) for key in self.keys), bottom=bottom)


# ---------------------------------------------------------------- one number


def _lines_of(
    grid: Grid, rows: Rows, key: str, value: Sequence[float], show: str
) -> dict[str, list[tuple[int, float]]]:
    """(number, value) of each combination of what else varies, by its name; lines of GPUs lie on one
    another where memory is shown."""
    others = [
        (k, grid.names.index(k))
        for k in grid.keys
        if k != key and not (k == "gpu" and show == "memory")
    ]
    found: dict[str, dict[int, float]] = {}
    for row, own in zip(rows, value, strict=True):
        at = _number(row[grid.names.index(key)])
        name = ", ".join(str(row[index]) for _, index in others if row[index] is not None)
        if at is not None:
            found.setdefault(name, {}).setdefault(at, own)
    return {name: sorted(points.items()) for name, points in found.items()}


def _draw_lines(
    drawing: Canvas, series: dict[str, list[tuple[int, float]]], grid: Grid, show: str
) -> None:
    """Lines over a number, capacities across them, and their names on the right."""
    numbers = sorted({x for points in series.values() for x, _ in points})
    highest = max(y for points in series.values() for _, y in points)
    cards = _cards(grid) if show == "memory" else {}
    near = {name: level for name, level in cards.items() if level < 1.15 * highest}
    frame = _Frame(numbers, 1.06 * max([highest, *near.values()]))
    frame.draw(drawing, _TITLES.get(_numeric(grid)[-1], _numeric(grid)[-1]), "")
    for name, level in near.items():
        if grid.hardware or level > 0.2 * highest:
            frame.level(drawing, level, name)
    for order, (name, points) in enumerate(series.items()):
        color, dash = _COLORS[order % 8], _DASHES[order // 8 % 3]
        placed = [(frame.x(x), frame.y(y)) for x, y in points]
        drawing.line(placed, color, width=2, dash=dash)
        for x, y in placed if len(placed) < 20 else ():
            drawing.dot(x, y, 3, color)
        if len(series) > 1:
            drawing.text(LEFT + 12, TOP + 16 + 16 * order, name, color=color, halo=True, bold=True)


class _Frame:
    """Where numbers and values lie; numbers by powers of two where they span three."""

    def __init__(self, numbers: Sequence[int], top: float) -> None:
        self.numbers, self.top = numbers, top
        self.is_log = numbers[0] > 0 and numbers[-1] >= 8 * numbers[0]
        self.right, self.bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(self, value: int) -> float:
        """The pixel of a number."""
        low, high, at = (
            (log2(v) if self.is_log else v) for v in (self.numbers[0], self.numbers[-1], value)
        )
        share = (at - low) / (high - low) if high > low else 0.5
        return LEFT + 8 + share * (self.right - LEFT - 16)

    def y(self, value: float) -> float:
        """The pixel of a value."""
        return self.bottom - value / self.top * (self.bottom - TOP)

    def draw(self, drawing: Canvas, across: str, up: str) -> None:
        """Grid, ticks and names."""
        for value in ticks(self.top):
            drawing.line([(LEFT, self.y(value)), (self.right, self.y(value))], GRID_LINE)
            drawing.text(LEFT - 8, self.y(value) + 4, number(value), anchor="end", color=FAINT)
        numbers = list(self.numbers)
        if self.is_log:
            numbers = [n for n in numbers if not n & (n - 1)] or numbers
        for value in numbers[:: max(1, -(-len(numbers) // 12))]:
            drawing.text(
                self.x(value), self.bottom + 18, _short(value), anchor="middle", color=FAINT
            )
        _name_axes(drawing, across, up, bottom=self.bottom)

    def level(self, drawing: Canvas, value: float, name: str) -> None:
        """A line across at a value, with its name."""
        y = self.y(value)
        drawing.line([(LEFT, y), (self.right, y)], FAINT, width=1, dash="5 4")
        drawing.text(self.right - 4, y - 4, name, size=11, color=FAINT, anchor="end", halo=True)


def _cards(grid: Grid) -> dict[str, float]:
    """GiB that each GPU named offers, or cards of the usual sizes: the whole of it where the device
    is shown, else without the context."""
    is_device = "device_bytes" in grid.names
    if not grid.hardware:
        return {f"{card} GiB": card - (0 if is_device else _KEPT_GIB) for card in _CARDS}
    return {
        h.gpu.name: (h.memory_bytes if is_device else h.usable_bytes) / GIB
        for h in grid.hardware.values()
    }


def _name_axes(drawing: Canvas, across: str, up: str, *, bottom: float) -> None:
    drawing.text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, across, anchor="middle", color=FAINT)
    if up:
        drawing.text(30, (TOP + bottom) / 2, up, anchor="middle", color=FAINT, upright=True)


def _short(value: int) -> str:
    """1024 -> '1k'."""
    return f"{value >> 10}k" if value >= 1024 and not value % 1024 else str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
