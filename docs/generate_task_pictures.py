"""Draws the pictures of docs/tasks.md, each by the command that stands above it, and the flow of
data of docs/how_it_works.md.

Usage: python docs/generate_task_pictures.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "estimator"))

from napkinmath.report.drawing import FAINT, INK, Canvas  # noqa: E402

IMAGES = ROOT / "docs" / "img"
COMMAND = re.compile(
    r"^estimate (?P<flags>.+ --(?:plot|timeline) (?P<file>\w+\.svg))(?: +#.*)?$", re.M
)
WIDTH, HEIGHT, WIDE, HIGH = 940, 470, 176, 62
GIVEN, LOWERED, ANSWERED, MEASURED = "#dbe6f5", "#f3ecd0", "#d9edd9", "#eee2ef"
# column, row, what it is, what it says, colour; columns and rows in steps of a box and a gap
BOXES = {
    "model": (0, 0, "model", "config.json, a name, numbers", GIVEN),
    "training": (0, 1, "training", "flags, a job file, Python", GIVEN),
    "machine": (0, 2, "machine", "GPU, links, measured rates", GIVEN),
    "tape": (1, 0, "tape", "the forward, op by op", LOWERED),
    "step": (1, 1, "step", "backward, update, sharding", LOWERED),
    "clock": (1, 2, "clock", "seconds of every kernel", LOWERED),
    "timeline": (2, 1, "timeline", "bytes and seconds in order", LOWERED),
    "traced": (2, 3, "trace, measurement", "the same timeline, stamped", MEASURED),
    "books": (3, 0, "allocator replay", "allocated, reserved, device", ANSWERED),
    "verdict": (3, 1, "verdict and range", "fits, and how sure that is", ANSWERED),
    "time": (3, 2, "step time", "phases, what bounds them", ANSWERED),
}
ARROWS = (
    ("model", "tape"),
    ("training", "step"),
    ("machine", "clock"),
    ("tape", "step"),
    ("step", "timeline"),
    ("clock", "timeline"),
    ("timeline", "books"),
    ("books", "verdict"),
    ("timeline", "time"),
    ("traced", "timeline"),
)


def commands() -> dict[str, list[str]]:
    """File -> words of the command of docs/tasks.md that draws it, where the page shows it."""
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    found = {each["file"]: shlex.split(each["flags"]) for each in COMMAND.finditer(page)}
    return {name: words for name, words in found.items() if f"(img/{name})" in page}


def drawn(name: str) -> str:
    """The picture that a command of the page writes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(folder) / word) if word == name else word for word in commands()[name]]
        command = [sys.executable, "-m", "napkinmath", *words]
        subprocess.run(command, capture_output=True, check=False, cwd=ROOT / "estimator")
        return (Path(folder) / name).read_text(encoding="utf-8")


def flow() -> str:
    """The flow of data from what is given to what is answered."""
    title, below = (
        "From a configuration to an answer",
        "blue is given, yellow lowered, green answered",
    )
    drawing = Canvas(WIDTH, HEIGHT, title, f"{below}; violet is run and checks the yellow")
    for source, target in ARROWS:
        _arrow(drawing, source, target)
    for column, row, name, words, color in BOXES.values():
        x, y = _corner(column, row)
        drawing.rect(x, y, WIDE, HIGH, color)
        drawing.text(x + WIDE / 2, y + 27, name, size=15, bold=True, anchor="middle")
        drawing.text(x + WIDE / 2, y + 46, words, size=11.5, color=FAINT, anchor="middle")
    return drawing.svg()


def _corner(column: int, row: int) -> tuple[float, float]:
    return 28 + column * (WIDE + 60), 88 + row * (HIGH + 32)


def _arrow(drawing: Canvas, source: str, target: str) -> None:
    """A line between the sides of two boxes that face one another, with its head."""
    (a, b), (c, d) = (_corner(*BOXES[name][:2]) for name in (source, target))
    if a == c:
        up = b > d
        start = a + WIDE / 2, b if up else b + HIGH
        end = c + WIDE / 2, d + HIGH if up else d
    else:
        start, end = (a + WIDE, b + HIGH / 2), (c, d + HIGH / 2)
    drawing.line([start, end], INK, width=1.4)
    along, across = end[0] - start[0], end[1] - start[1]
    length = (along**2 + across**2) ** 0.5
    x, y = along / length, across / length
    left = end[0] - 9 * x + 4 * y, end[1] - 9 * y - 4 * x
    right = end[0] - 9 * x - 4 * y, end[1] - 9 * y + 4 * x
    drawing.line([left, end, right], INK, width=1.4)


def main() -> None:
    for name in commands():
        (IMAGES / name).write_text(drawn(name), encoding="utf-8")
    (IMAGES / "flow.svg").write_text(flow(), encoding="utf-8")


if __name__ == "__main__":
    main()
