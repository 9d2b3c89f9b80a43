"""Where the constants of napkinmath.answers.ranges come from: errors on published runs, one source
left out at a time.

    python benchmarks/accuracy/held_out_ranges.py [--memory CSV] [--blind]
                                                  [--keep FILE [--minutes N]]

Each source weighs the same however many rows it has. A line without its source gives the constants
that the others would have set, and what share of the left-out source's measurements they cover.
Single-GPU rows only; speeds are held_out_speed.py's. `--keep` holds what was priced in a file, so
that a run of `--minutes` goes on where the last one ended; it belongs to one state of the code. The
table comes once every row is in it. Exit code 1 until then.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.answers.ranges import largest_logits, memory_ranges, within_device
from published.doubts import doubt
from published.predict import Outcome
from published.rows import ALLOCATED, DEVICE, Row, Unreadable, read_rows
from published.run import Outcomes
from published.understand import understand

DATA = Path(__file__).resolve().parents[1] / "data"
COVERED = 0.9
FEW = 10
BASES = [i / 200 for i in range(2, 21)]
SHARES = [i / 10 for i in range(11)]


@dataclass(frozen=True)
class Observation:
    """One measurement beside its prediction, in bytes, and what its range may be made of."""

    source: str
    quantity: str
    measured: float
    predicted: float
    cache: float = 0.0
    logits: float = 0.0
    doubts: tuple[float, float] = (0.0, 0.0)
    """What assumptions and an unsure unit add below and above, as shares of the prediction."""
    varied: bool = False
    assumed: bool = False

    @property
    def error(self) -> float:
        """Relative: measured over predicted, less one."""
        return self.measured / self.predicted - 1


@dataclass(frozen=True)
class Constants:
    """What a set of observations sets, as in napkinmath.answers.ranges."""

    allocated: float
    base: float
    cache_below: float
    cache_above: float
    varied_below: float
    varied_above: float

    def covers(self, o: Observation) -> bool:
        """Whether the span around an observation's prediction holds the measurement."""
        if o.quantity == ALLOCATED:
            return -self.allocated - o.doubts[0] <= o.error <= self.allocated + o.doubts[1]
        below, above = (
            (self.varied_below, self.varied_above)
            if o.varied
            else (self.cache_below, self.cache_above)
        )
        return _inside(o, self.base, below, above)


def quantile(found: Sequence[tuple[str, float]], share: float) -> float:
    """The value below which `share` of the weight lies, every source having the same; 0 of
    nothing."""
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
    """Quantiles of allocated; of reserved and device figures the narrowest spans with
    which memory is covered well enough."""
    observations = list(observations)
    known = [o for o in observations if not o.assumed]  # what was assumed has widths of its own
    allocated = (
        math.ceil(
            200
            * _quantile((o for o in known if o.quantity == ALLOCATED), lambda o: abs(o.error), 0.95)
        )
        / 200
    )
    base, cache_below, cache_above = narrowest(
        [o for o in observations if o.quantity != ALLOCATED and not o.varied],
        allocated,
    )

    def below(o: Observation) -> float:
        return max(0.0, (o.predicted * (1 - base) - o.measured) / o.cache) if o.cache else 0.0

    def above(o: Observation) -> float:
        return (
            max(0.0, (o.measured - o.predicted * (1 + base)) / (o.cache + o.logits))
            if o.cache + o.logits
            else 0.0
        )

    varied = [o for o in known if o.varied]
    return Constants(
        allocated=allocated,
        base=base,
        cache_below=cache_below,
        cache_above=cache_above,
        varied_below=_quantile(varied, below, 0.9),
        varied_above=_quantile(varied, above, 0.9),
    )


def narrowest(found: Sequence[Observation], allocated: float) -> tuple[float, float, float]:
    """(base, share of the cache below, share of cache and logits above) of the least width that
    holds nine of ten figures.

    Nine of ten of every source and on average over sources; those of few figures have no say of
    their own, since one run would decide. The base is no less than that of allocated bytes, which
    reserved ones contain. The width is the average over sources.
    """
    groups = by_source((o.source, o) for o in found)
    scores = {source: _scores(tuple(group)) for source, group in groups.items()}
    many = [s for name, s in scores.items() if len(groups[name]) >= FEW] or list(scores.values())
    large = [s for s in many if max(s.held) >= COVERED]
    enough = COVERED * len(scores)
    tried = [(sum(s.width(*spans) for s in scores.values()), i) for i, spans in enumerate(SPANS)]
    for _, i in sorted(tried):
        wide_enough = SPANS[i][0] >= min(allocated, max(BASES))
        each = all(s.held[i] >= COVERED for s in large)
        if wide_enough and each and sum(s.held[i] for s in scores.values()) >= enough:
            return SPANS[i]
    return max(BASES), max(SHARES), max(SHARES)


SPANS = list(itertools.product(BASES, SHARES, SHARES))


@dataclass(frozen=True)
class Scores:
    """What the figures of one source say of every span."""

    held: tuple[float, ...]
    """Share of them inside, in the order of SPANS."""
    doubts: float
    cache: float
    grown: float
    """Means over the predictions, as a span's width is made of them."""

    def width(self, base: float, below: float, above: float) -> float:
        """Mean width of a span, as a share of the predictions."""
        return 2 * base + self.doubts + below * self.cache + above * self.grown


@functools.cache
def _scores(group: tuple[Observation, ...]) -> Scores:
    """Once for a source, which all but one of the tables with a source left out have."""
    count = len(group)
    return Scores(
        held=tuple(sum(_inside(o, *spans) for o in group) / count for spans in SPANS),
        doubts=sum(sum(o.doubts) for o in group) / count,
        cache=sum(o.cache / o.predicted for o in group) / count,
        grown=sum((o.cache + o.logits) / o.predicted for o in group) / count,
    )


def _inside(o: Observation, base: float, below: float, above: float) -> bool:
    low = o.predicted * (1 - base - o.doubts[0]) - below * o.cache
    high = o.predicted * (1 + base + o.doubts[1]) + above * (o.cache + o.logits)
    return low <= o.measured <= high


def by_source(found: Iterable[tuple[str, Observation]]) -> dict[str, list[Observation]]:
    """Observations by who measured them."""
    groups: dict[str, list[Observation]] = {}
    for source, o in found:
        groups.setdefault(source, []).append(o)
    return groups


def _quantile(
    found: Iterable[Observation], value: Callable[[Observation], float], share: float
) -> float:
    return max(0.0, quantile([(o.source, value(o)) for o in found], share))


def observe(
    rows: Iterable[Row], known: dict[str, list[Observation]], *, blind: bool, minutes: float
) -> bool:
    """Adds every measurement of every row on one GPU that can be read to `known`, by row; whether
    all were reached in so many minutes."""
    outcomes, end = Outcomes(), time.monotonic() + 60 * minutes
    for row in rows:
        if row.row_id in known:
            continue
        if time.monotonic() > end:
            return False
        known[row.row_id] = []
        try:
            if row.whole("n_gpus", 1) == 1:
                known[row.row_id] = _of_row(row, outcomes.of(understand(row, blind=blind)))
        except Unreadable:
            continue
    return True


def _of_row(row: Row, outcome: Outcome) -> list[Observation]:
    e, doubts = outcome.estimate, doubt(outcome.doubts)
    books, logits, memory = within_device(e), float(largest_logits(e)), memory_ranges(e)
    varied, assumed = (
        len(e.replays) > 1,
        bool(set(outcome.job.assumed) & {"stack", "sequence", "weights", "checkpointing"}),
    )
    found: list[Observation] = []
    for quantity, value in row.measured():
        context = e.hardware.context_bytes if quantity == DEVICE and e.hardware is not None else 0
        held = memory.device.value - context if quantity == DEVICE else memory.reserved.value
        predicted = books.peak_allocated if quantity == ALLOCATED else held + context
        cache = max(0.0, held - books.peak_allocated)
        found.append(
            Observation(
                row.source,
                quantity,
                value * row.bytes_per_unit,
                predicted,
                cache,
                logits,
                doubts,
                varied,
                assumed,
            )
        )
    return found


def table(observations: list[Observation]) -> str:
    """The constants of all sources, and of all but one with the share of it that they cover."""
    names = list(Constants.__dataclass_fields__)
    lines = [
        "| source left out | rows | " + " | ".join(names) + " | covers |",
        "|---" * (len(names) + 3) + "|",
    ]
    lines.append(_line("none: all sources", observations, constants(observations)))
    for source in sorted({o.source for o in observations}):
        own = [o for o in observations if o.source == source]
        lines.append(_line(source, own, constants(o for o in observations if o.source != source)))
    return "\n".join(lines)


def _line(name: str, own: list[Observation], found: Constants) -> str:
    values = " | ".join(f"{getattr(found, field):.3f}" for field in Constants.__dataclass_fields__)
    return f"| {name} | {len(own)} | {values} | {_share(own, found)} |"


def _share(own: list[Observation], found: Constants) -> str:
    return f"{sum(found.covers(o) for o in own) / len(own):.0%}" if own else "-"


def read_kept(path: Path) -> dict[str, list[Observation]]:
    """Observations of a file that `keep` wrote, by row; none where there is no such file."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {
        row: [Observation(**{**o, "doubts": tuple(o["doubts"])}) for o in found]
        for row, found in kept.items()
    }


def keep(known: dict[str, list[Observation]], path: Path) -> None:
    """Writes observations for `read_kept`."""
    found = {row: [asdict(o) for o in each] for row, each in known.items()}
    path.write_text(json.dumps(found), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=Path, default=DATA / "memory.csv")
    parser.add_argument(
        "--blind", action="store_true", help="read every row by the generic rules only"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="hold what was priced here")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop pricing after so many"
    )
    options = parser.parse_args()
    known = read_kept(options.keep) if options.keep else {}
    done = observe(read_rows(options.memory), known, blind=options.blind, minutes=options.minutes)
    if options.keep:
        keep(known, options.keep)
    if not done:
        print(f"{len(known)} rows are priced; run it again", file=sys.stderr)
        return 1
    print(table([o for found in known.values() for o in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
