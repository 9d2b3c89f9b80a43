"""How wide the range of a speed has to be: the width of the kernels' own doubt in
napkinmath.answers.speed_range, one source left out at a time.

    python benchmarks/accuracy/held_out_speed.py [--throughput CSV ...] [--blind]

All other doubts (host, network, slot, rules that rest on one source, what a row does not say) are
as they are printed. The widths are the narrowest, in steps of 0.01, with which nine of ten speeds
lie inside on average over sources, and four of five in each of at least ten rows. A source weighs
the same however many rows it has. A line without its source gives the widths that the others would
have set, and what share of the left-out source's speeds the ranges of those widths hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.answers.speed_range import KERNELS, speed_doubts
from napkinmath.base.errors import InputError
from published.predict import Outcome
from published.rows import Row, Unreadable, read_rows
from published.understand import understand

DATA = Path(__file__).resolve().parents[1] / "data"
AVERAGE, EACH, FEW = 0.9, 0.8, 10
BELOW = [i / 100 for i in range(8, 31)]
ABOVE = [i / 100 for i in range(8, 46)]
WORKERS = 2


@dataclass(frozen=True)
class Speed:
    """One measured speed beside its prediction."""

    source: str
    place: str
    error: float
    """Predicted over measured tokens a second, less one: how much longer the step took."""
    below: float
    above: float
    """What all doubts but that of the kernels add, as shares of the step's seconds."""

    def is_inside(self, below: float, above: float) -> bool:
        """Whether the range holds it with these widths of the kernels' own doubt."""
        low, high = self.widths(below, above)
        return -min(low, 0.9) <= self.error <= high

    def widths(self, below: float, above: float) -> tuple[float, float]:
        """(below, above) of the whole range, as shares of the seconds."""
        return (below**2 + self.below**2) ** 0.5, (above**2 + self.above**2) ** 0.5


def observe(row: Row, *, blind: bool) -> list[Speed]:
    """The speeds of a row; none where it cannot be read or priced."""
    try:
        outcome = Outcome(understand(row, blind=blind))
        predictions = outcome.speed()
    except (Unreadable, InputError):
        return []
    doubts = [d for d in speed_doubts(outcome.estimate) if d.name != KERNELS]
    assumed = outcome.doubt_of_speed
    below = sum((d.below**2 for d in doubts), assumed[0] ** 2) ** 0.5
    above = sum((d.above**2 for d in doubts), assumed[1] ** 2) ** 0.5
    return [Speed(p.source, p.place, p.error, below, above) for p in predictions]


def narrowest(found: Sequence[Speed]) -> tuple[float, float]:
    """(below, above) of the least sum that hold enough of every source and on average; the widest
    of the grid where none do."""
    groups = list(by_source(found).values())
    large = [group for group in groups if len(group) >= FEW]
    for below, above in sorted(product(BELOW, ABOVE), key=sum):
        shares = [share(group, below, above) for group in groups]
        if sum(shares) >= AVERAGE * len(groups) and all(
            share(group, below, above) >= EACH for group in large
        ):
            return below, above
    return max(BELOW), max(ABOVE)


def share(found: Sequence[Speed], below: float, above: float) -> float:
    """Share of speeds inside their ranges."""
    return sum(speed.is_inside(below, above) for speed in found) / len(found)


def by_source(found: Iterable[Speed]) -> dict[tuple[str, str], list[Speed]]:
    """Speeds by who measured them, on one GPU, one node and many apart."""
    groups: dict[tuple[str, str], list[Speed]] = {}
    for speed in found:
        groups.setdefault((speed.source, speed.place), []).append(speed)
    return groups


def table(found: Sequence[Speed]) -> str:
    """The widths of all sources, and of all but one with the share of it that they hold."""
    lines = [
        "| source left out | rows | below | above | inside | average width |",
        "|---|---|---|---|---|---|",
        _line("none", found, *narrowest(found)),
    ]
    for source in sorted({speed.source for speed in found}):
        own = [speed for speed in found if speed.source == source]
        others = [speed for speed in found if speed.source != source]
        lines.append(_line(source, own, *narrowest(others)))
    return "\n".join(lines)


def _line(name: str, own: Sequence[Speed], below: float, above: float) -> str:
    groups = list(by_source(own).values())
    inside = sum(share(group, below, above) for group in groups) / len(groups)
    width = sum(sum(sum(s.widths(below, above)) for s in g) / len(g) for g in groups) / len(groups)
    return f"| {name} | {len(own)} | {below:.2f} | {above:.2f} | {inside:.0%} | {width:.2f} |"


def _observed(asked: tuple[Path, bool, int]) -> list[Speed]:
    path, blind, part = asked
    return [s for row in read_rows(path)[part::WORKERS] for s in observe(row, blind=blind)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--throughput", type=Path, action="append", help="default: both tables")
    parser.add_argument(
        "--blind", action="store_true", help="read every row by the generic rules only"
    )
    options = parser.parse_args()
    tables = options.throughput or [DATA / "throughput.csv", DATA / "throughput_third.csv"]
    asked = [(path, options.blind, part) for path in tables for part in range(WORKERS)]
    with ProcessPoolExecutor(WORKERS) as pool:
        found = [speed for part in pool.map(_observed, asked) for speed in part]
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
