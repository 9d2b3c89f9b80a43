"""Draws the rooms and their imports for docs/ARCHITECTURE.md, and counts how a configuration walks
through them.

    python docs/generate_architecture.py          # writes docs/img/rooms.svg
    python docs/generate_architecture.py --walk   # prints the walk

The picture is a matrix: a row imports the columns that are marked in it. Nothing left of the
diagonal is marked, for a room imports lower rooms only. The walk is the order in which modules are
entered first between `estimate()` and the printed report, everything being imported before: a move
is a change of room, a climb a move to a higher one. Plain data that is looked up from anywhere
(`base`, `config`, `catalog`) is not counted.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent))

from import_graph import CORE, ROOMS, Kind, all_imports, modules, room_of

PICTURE = Path(__file__).resolve().parent / "img" / "rooms.svg"
CELL, TOP, NAMES, WORDS = 26, 96, 96, 700
LINE, TEXT, FAINT, MARK, TYPES = "#d5dbe0", "#1f2933", "#66727d", "#3b5b92", "#ffffff"
UNCOUNTED = ("base", "config", "catalog")  # plain data and words, looked up from anywhere


def purpose(room: str) -> str:
    """What a room is for: the first clause of its `__init__.py`."""
    text = ast.get_docstring(ast.parse((CORE / room / "__init__.py").read_text())) or ""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def room_imports() -> dict[tuple[str, str], bool]:
    """(importing room, imported room) -> whether at run time, not for the type checker alone."""
    found: dict[tuple[str, str], bool] = {}
    for one in all_imports():
        pair = room_of(one.source), room_of(one.target)
        if all(pair) and pair[0] != pair[1]:
            found[pair] = found.get(pair, False) or one.kind is not Kind.TYPES
    return found


def picture() -> str:
    """The matrix as SVG, the highest room first."""
    shown = ROOMS[::-1]
    width, height = NAMES + CELL * len(shown) + WORDS, TOP + CELL * len(shown) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, room in enumerate(shown):
        y, x = TOP + CELL * number, NAMES + CELL * number + CELL // 2
        parts += [
            f'<text x="{NAMES - 8}" y="{y + 17}" text-anchor="end" fill="{TEXT}">{room}</text>',
            f'<text x="{NAMES + CELL * len(shown) + 12}" y="{y + 17}" font-size="11"'
            f' fill="{FAINT}">{escape(purpose(room))}</text>',
            f'<text transform="translate({x + 4} {TOP - 8}) rotate(-60)" fill="{TEXT}">'
            f"{room}</text>",
        ]
    parts += _cells(shown)
    y = TOP + CELL * len(shown) + 20
    note = "A row imports the marked columns: filled at run time, open for the type checker only."
    parts += [f'<text x="{NAMES}" y="{y}" font-size="11" fill="{FAINT}">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _cells(shown: tuple[str, ...]) -> Iterator[str]:
    marked = room_imports()
    for row, source in enumerate(shown):
        for column, target in enumerate(shown):
            x, y = NAMES + CELL * column, TOP + CELL * row
            fill = "#eef1f4" if row == column else "none"
            yield (
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}"'
                f' stroke="{LINE}"/>'
            )
            if (source, target) in marked:
                inside = MARK if marked[source, target] else TYPES
                yield (
                    f'<circle cx="{x + CELL // 2}" cy="{y + CELL // 2}" r="6" fill="{inside}"'
                    f' stroke="{MARK}" stroke-width="1.5"/>'
                )


def walk() -> list[str]:
    """The modules that are entered from `estimate()` to the report, in order of the first call."""
    sys.path.insert(0, str(CORE.parent))
    for name in modules():
        if not name.endswith("__main__"):
            __import__(name)
    import napkinmath
    from napkinmath.report.table import report_text

    files = {str(path): name for name, path in modules().items()}
    order: dict[str, None] = {}

    def entered(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            name = files.get(frame.f_code.co_filename)
            if name is not None:
                order.setdefault(name)

    sys.setprofile(entered)
    try:
        quantization = napkinmath.QuantizationConfig()
        report_text(
            napkinmath.estimate(
                "llama-7b",
                quantization=quantization,
                adapter=napkinmath.AdapterConfig(),
                micro_batch_size=4,
                hardware="A100-80",
            ),
            width=100,
        )
    finally:
        sys.setprofile(None)
    return list(order)


def moves(order: list[str]) -> list[tuple[str, str]]:
    """Each change of room on the way."""
    rooms = [room for name in order if (room := room_of(name)) and room not in UNCOUNTED]
    return [(before, after) for before, after in pairwise(rooms) if before != after]


def climbs(order: list[str]) -> int:
    """Moves to a higher room."""
    return sum(ROOMS.index(after) > ROOMS.index(before) for before, after in moves(order))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walk", action="store_true", help="print the walk of a configuration")
    if parser.parse_args().walk:
        order = walk()
        print("\n".join(name.removeprefix("napkinmath.") for name in order))
        print(f"{len(order)} modules, {len(moves(order))} moves, {climbs(order)} of them climbs")
    else:
        PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
