"""What a source whose library nobody names is worth: every row read blind with the name of its
library taken away.

    python benchmarks/accuracy/held_out_library.py [--rows N] [--named]

Up to N rows of each source (on one GPU, one node and many) are read as by someone who knows neither
the library nor its version: the doubt "library" of published/doubts.py is what holds four fifths of
them then. `--named` leaves the names, which is the blind reading. A source weighs the same however
many rows it has; a line has the share inside its range and the average width.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from held_out_time import sample
from napkinmath.base.errors import InputError
from published import tools
from published.predict import Outcome, Prediction
from published.rows import SPEED, Row, Unreadable, read_rows
from published.understand import understand

DATA = Path(__file__).resolve().parents[1] / "data"
TABLES = ("memory.csv", "memory_third.csv", "throughput.csv", "throughput_third.csv")


def predictions(rows: Sequence[Row]) -> Iterator[Prediction]:
    """Every figure of rows that can be read and priced, read blind."""
    for row in rows:
        try:
            outcome = Outcome(understand(row, blind=True))
            yield from (*outcome.memory(), *outcome.speed())
        except (Unreadable, InputError, ValueError):
            continue


def forget_libraries() -> None:
    """Reads every later row as one that names no library."""
    tools.TOOLS = ()


def table(found: Sequence[Prediction]) -> str:
    """Sources, share inside and width by quantity and place."""
    groups: dict[tuple[str, str], dict[str, list[Prediction]]] = defaultdict(dict)
    for p in found:
        place = p.place if p.quantity == SPEED or p.place == "one GPU" else "several GPUs"
        groups[p.quantity, place].setdefault(p.source, []).append(p)
    lines = ["| figure | sources | inside | average width |", "|---|---|---|---|"]
    for (quantity, place), sources in sorted(groups.items()):
        inside = [sum(p.inside for p in own) / len(own) for own in sources.values()]
        width = [sum(p.width for p in own) / len(own) for own in sources.values()]
        count = len(sources)
        lines.append(
            f"| {quantity}, {place} | {count} | {sum(inside) / count:.0%} | {sum(width) / count:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5, help="rows of each source and place")
    parser.add_argument("--named", action="store_true", help="leave the names of the libraries")
    options = parser.parse_args()
    if not options.named:
        forget_libraries()
    found: list[Prediction] = []
    for name in TABLES:
        found += predictions(sample(read_rows(DATA / name), options.rows))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
