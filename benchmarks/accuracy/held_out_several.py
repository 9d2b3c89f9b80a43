"""Where the ranges of memory on several GPUs come from, one source left out at a time.

    python benchmarks/accuracy/held_out_several.py [--memory CSV ...] [--blind]

The shares of the cache are those of one GPU (held_out_ranges.py). What is tried is the base, and
what communicators may hold beyond what is priced: the least width that holds nine of ten figures on
average over sources, and four of five of every source of at least ten. A line without its source
gives what the others would have set, and what it covers of the source. Rows whose kind of memory is
what a tool's log prints are left out. Allocated bytes have a base of their own, found alike, in a
second table.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from held_out_ranges import BASES, COVERED, DATA, FEW
from napkinmath.answers.ranges import (
    COMMUNICATORS_BELOW,
    RESERVED_ON_SEVERAL,
    largest_logits,
    uneven_experts,
    within_device,
)
from published.doubts import doubt
from published.predict import Outcome
from published.rows import ALLOCATED, DEVICE, Row, Unreadable, read_rows
from published.understand import understand

COMMUNICATORS = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0]
EACH = 0.8


@dataclass(frozen=True)
class Spread:
    """One measurement on several GPUs beside its prediction, in bytes."""

    source: str
    measured: float
    predicted: float
    cache: float
    logits: float
    communicators: float
    doubts: tuple[float, float]
    uneven: float = 0.0
    allocated: bool = False

    def inside(self, base: float, above: float) -> bool:
        """Whether the span of these constants holds it; of allocated bytes that of the base."""
        if self.allocated:
            low = self.predicted * (1 - base - self.doubts[0])
            high = self.predicted * (1 + base + self.doubts[1]) + self.uneven
            return low <= self.measured <= high
        less = COMMUNICATORS_BELOW * self.communicators if above else 0.0
        more = RESERVED_ON_SEVERAL.cache_above * (self.cache + self.logits)
        low = self.predicted * (1 - base - self.doubts[0]) - less
        high = self.predicted * (1 + base + self.doubts[1]) + more + above * self.communicators
        high += self.uneven
        return low - RESERVED_ON_SEVERAL.cache_below * self.cache <= self.measured <= high


def observe(rows: Iterable[Row], *, blind: bool) -> list[Spread]:
    """Every figure of rows on more than one GPU that can be read."""
    found: list[Spread] = []
    for row in rows:
        try:
            if row.whole("n_gpus", 1) > 1:
                found += _of_row(row, blind)
        except Unreadable:
            continue
    return found


def _of_row(row: Row, blind: bool) -> list[Spread]:
    outcome = Outcome(understand(row, blind=blind, memory=True))
    e, unit = outcome.of_measured_rank(), row.bytes_per_unit
    books, hardware = within_device(e), e.hardware
    assert hardware is not None
    return [
        Spread(
            row.source,
            p.measured * unit,
            p.predicted * unit,
            float(books.peak_reserved - books.peak_allocated),
            float(largest_logits(e)),
            float(hardware.communicator_bytes if p.quantity == DEVICE else 0),
            doubt(outcome.doubts),
            uneven_experts(e),
            p.quantity == ALLOCATED,
        )
        for p in outcome.memory()
        if not (p.quantity == DEVICE and outcome.logged())
    ]


def by_source(found: Iterable[Spread]) -> dict[str, list[Spread]]:
    """Figures by who measured them."""
    groups: dict[str, list[Spread]] = {}
    for o in found:
        groups.setdefault(o.source, []).append(o)
    return groups


def covered(group: Sequence[Spread], base: float, above: float) -> float:
    """Share of figures inside."""
    return sum(o.inside(base, above) for o in group) / len(group)


def constants(found: Sequence[Spread]) -> tuple[float, float]:
    """(base, communicators above) of the least width that is enough; allocated bytes have no
    communicators."""
    groups = by_source(found)
    best, least = (max(BASES), max(COMMUNICATORS)), math.inf
    tried = [0.0] if all(o.allocated for o in found) else COMMUNICATORS
    for spans in itertools.product(BASES, tried):
        shares = {name: covered(group, *spans) for name, group in groups.items()}
        width = sum(2 * spans[0] + spans[1] * o.communicators / o.predicted for o in found)
        enough = all(shares[n] >= EACH for n, group in groups.items() if len(group) >= FEW)
        if enough and sum(shares.values()) >= COVERED * len(groups) and width < least:
            best, least = spans, width
    return best


def table(found: Sequence[Spread]) -> str:
    """The constants of all sources, and of all but one with the share of it that they cover."""
    lines = [
        "| source left out | figures | base | communicators above | covers |",
        "|---|---|---|---|---|",
    ]
    for name in ("", *sorted(by_source(found))):
        own = [o for o in found if o.source == name] or list(found)
        base, above = constants([o for o in found if o.source != name])
        share = covered(own, base, above)
        lines.append(f"| {name or 'none'} | {len(own)} | {base:.3f} | {above:.1f} | {share:.0%} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=Path, action="append", help="default: both tables")
    parser.add_argument("--blind", action="store_true", help="by the generic rules only")
    options = parser.parse_args()
    tables = options.memory or [DATA / "memory.csv", DATA / "memory_third.csv"]
    rows = [row for path in tables for row in read_rows(path)]
    found = observe(rows, blind=options.blind)
    print(table([o for o in found if not o.allocated]))
    print(f"\nAllocated bytes\n\n{table([o for o in found if o.allocated])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
