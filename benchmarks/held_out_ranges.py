"""Where the constants of napkinmath.accuracy come from: quantiles of errors on published runs, one source left out at a time.

    python benchmarks/held_out_ranges.py [--memory CSV] [--throughput CSV] [--blind]

Each source weighs the same however many rows it has. A line without its source gives the constants that the others would have set, and
what share of the left-out source's measurements they cover. Single-GPU rows only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "estimator"))

from napkinmath.accuracy import largest_logits, within_device
from published.predict import Outcome, measured_speed
from published.rows import ALLOCATED, DEVICE, Row, Unreadable, read_rows
from published.understand import understand

DATA = Path(__file__).resolve().parent / "data"
SMALL_CACHE = 0.1  # of the figure: below it the error of a reserved figure is not the cache's


@dataclass(frozen=True)
class Observation:
    """One measurement beside its prediction, in bytes (or tokens a second), and what its range may be made of."""

    source: str
    quantity: str
    measured: float
    predicted: float
    cache: float = 0.0
    logits: float = 0.0
    varied: bool = False
    assumed: bool = False
    launch_bound: bool = False

    @property
    def error(self) -> float:
        """Relative: measured over predicted, less one."""
        return self.measured / self.predicted - 1


@dataclass(frozen=True)
class Constants:
    """What a set of observations sets, as in napkinmath.accuracy."""

    allocated: float
    base: float
    cache_below: float
    cache_above: float
    varied_below: float
    varied_above: float
    seconds_below: float
    seconds_above: float

    def covers(self, o: Observation) -> bool:
        """Whether the span around an observation's prediction holds the measurement."""
        value = o.predicted
        if o.quantity == ALLOCATED:
            return abs(o.error) <= self.allocated
        if o.quantity == "seconds":
            return 1 / (1 + self.seconds_above) <= o.measured / value <= 1 / (1 - self.seconds_below)
        below, above = (self.varied_below, self.varied_above) if o.varied else (self.cache_below, self.cache_above)
        return value * (1 - self.base) - below * o.cache <= o.measured <= value * (1 + self.base) + above * (o.cache + o.logits)


def quantile(found: Sequence[tuple[str, float]], share: float) -> float:
    """The value below which `share` of the weight lies, every source having the same; 0 of nothing."""
    counts: dict[str, int] = {}
    for source, _ in found:
        counts[source] = counts.get(source, 0) + 1
    total = 0.0
    for source, value in sorted(found, key=lambda item: item[1]):
        total += 1 / counts[source] / len(counts)
        if total >= share - 1e-9:
            return value
    return 0.0


def constants(observations: Iterable[Observation]) -> Constants:
    """The quantiles of some observations: base from figures with little cache, the cache's shares from what base leaves."""
    known = [o for o in observations if not o.assumed]
    cached = [o for o in known if o.quantity not in (ALLOCATED, "seconds")]
    base = _quantile((o for o in cached if o.cache + o.logits < SMALL_CACHE * o.predicted), lambda o: abs(o.error), 0.9)

    def below(o: Observation) -> float:
        return max(0.0, (o.predicted * (1 - base) - o.measured) / o.cache) if o.cache else 0.0

    def above(o: Observation) -> float:
        return max(0.0, (o.measured - o.predicted * (1 + base)) / (o.cache + o.logits)) if o.cache + o.logits else 0.0

    fixed, varied = [o for o in cached if not o.varied], [o for o in cached if o.varied]
    speeds = [o for o in known if o.quantity == "seconds" and not o.launch_bound]
    return Constants(
        allocated=_quantile((o for o in known if o.quantity == ALLOCATED), lambda o: abs(o.error), 0.95), base=base, cache_below=_quantile(fixed, below, 0.9), cache_above=_quantile(fixed, above, 0.9),
        varied_below=_quantile(varied, below, 0.95), varied_above=_quantile(varied, above, 0.95), seconds_below=_quantile(speeds, lambda o: 1 - o.predicted / o.measured, 0.95),
        seconds_above=_quantile(speeds, lambda o: o.predicted / o.measured - 1, 0.95),
    )  # fmt: skip


def _quantile(found: Iterable[Observation], value: Callable[[Observation], float], share: float) -> float:
    return max(0.0, quantile([(o.source, value(o)) for o in found], share))


def observe(rows: Iterable[Row], *, blind: bool = False) -> list[Observation]:
    """Every measurement of every row on one GPU that can be read."""
    found: list[Observation] = []
    for row in rows:
        try:
            if row.whole("n_gpus", 1) == 1:
                found += _of_row(row, blind)
        except Unreadable:
            continue
    return found


def _of_row(row: Row, blind: bool) -> list[Observation]:
    job = understand(row, blind=blind)
    e = Outcome(job).estimate
    books, logits = within_device(e), float(largest_logits(e))
    cache = float(books.peak_reserved - books.peak_allocated)
    varied, assumed = len(e.replays) > 1, bool(set(job.assumed) & {"stack", "sequence", "weights", "checkpointing"})
    found: list[Observation] = []
    for quantity, value in row.measured():
        context = e.hardware.context_bytes if quantity == DEVICE and e.hardware is not None else 0
        predicted = books.peak_allocated if quantity == ALLOCATED else books.peak_reserved + context
        found.append(Observation(row.source, quantity, value * row.bytes_per_unit, predicted, cache, logits, varied, assumed))
    speed = measured_speed(row)
    if speed is not None and e.time is not None:
        found.append(
            Observation(row.source, "seconds", speed, e.time.tokens_per_s, assumed=assumed, launch_bound=e.time.share("launch") > 0.05)
        )
    return found


def table(observations: list[Observation]) -> str:
    """The constants of all sources, and of all but one with the share of it that they cover."""
    names = list(Constants.__dataclass_fields__)
    lines = ["| source left out | rows | " + " | ".join(names) + " | covers memory | covers speed |", "|---" * (len(names) + 4) + "|"]
    lines.append(_line("none: all sources", observations, constants(observations)))
    for source in sorted({o.source for o in observations}):
        own = [o for o in observations if o.source == source]
        lines.append(_line(source, own, constants(o for o in observations if o.source != source)))
    return "\n".join(lines)


def _line(name: str, own: list[Observation], found: Constants) -> str:
    values = " | ".join(f"{getattr(found, field):.3f}" for field in Constants.__dataclass_fields__)
    shares = (_share([o for o in own if (o.quantity == "seconds") is speed], found) for speed in (False, True))
    return f"| {name} | {len(own)} | {values} | {' | '.join(shares)} |"


def _share(own: list[Observation], found: Constants) -> str:
    return f"{sum(found.covers(o) for o in own) / len(own):.0%}" if own else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=Path, default=DATA / "memory.csv")
    parser.add_argument("--throughput", type=Path, default=DATA / "throughput.csv")
    parser.add_argument("--blind", action="store_true", help="read every row by the generic rules only")
    options = parser.parse_args()
    rows = {row.row_id: row for path in (options.throughput, options.memory) for row in read_rows(path)}
    print(table(observe(rows.values(), blind=options.blind)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
