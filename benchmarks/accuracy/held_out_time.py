"""What published speeds say of each constant of time, one source left out at a time.

    python benchmarks/accuracy/held_out_time.py [--throughput CSV] [--rows N] [--out FILE]

Each constant is multiplied by 0.5, 0.71, 1.41 and 2, and up to N rows of every source (on one GPU,
one node and many apart) are priced again. A source feels a constant whose range moves its steps by
1% in the median. With one such source left out, the others choose the factor of their least error:
the mean over sources of the median error's size. A line gives the least and the greatest of these
choices, and how far off the left-out sources are at the value and at the choice of the others.
Constants that no published step feels are named, since such a table says nothing of them. Nothing
is set by this command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.base.errors import InputError
from napkinmath.config.hardware import Gpu
from napkinmath.timing import attention, collectives, efficiency, host, overlap, stragglers
from napkinmath.timing.efficiency import Efficiency
from published.predict import Outcome
from published.rows import Row, Unreadable, read_rows
from published.understand import Job, understand

DATA = Path(__file__).resolve().parents[1] / "data"
FACTORS = (0.5, 0.71, 1.0, 1.41, 2.0)
FELT, WORKERS = 0.01, 2


@dataclass(frozen=True)
class Constant:
    """One constant: its meaning, and the module's name or the field of `Efficiency` that has it."""

    meaning: str
    name: str
    module: ModuleType | None = None

    @property
    def place(self) -> str:
        """Where it stands, as the page says it."""
        return (self.module or efficiency).__name__.removeprefix("napkinmath.timing.") + ".py"


CONSTANTS = (
    Constant("start of a product", "gemm_start_s"),
    Constant("start of a wave of tiles", "wave_start_s"),
    Constant("feeding of small tiles", "feed_cost"),
    Constant("part of an empty wave that is lost", "_TAIL_SHARE", efficiency),
    Constant("traffic of a product that is exposed", "_EXPOSED_SHARE", efficiency),
    Constant("products with unaligned rows", "unaligned_share"),
    Constant("batched products with unaligned rows", "_UNALIGNED_BATCH_SHARE", efficiency),
    Constant("start of a tile in attention's backward", "_TILE_START_KEYS_BACKWARD", attention),
    Constant("bandwidth of a copy", "stream_bytes_per_s"),
    Constant("share of it that torch's kernels reach", "eager_share"),
    Constant("reads that hit L2", "_L2_HIT_SHARE", efficiency),
    Constant("start of a kernel", "kernel_start_s"),
    Constant("instructions that decode 4 bits", "decode_instructions_per_s"),
    Constant("bytes that unpack a word by operations", "_OPERATION_BYTES_PER_VALUE", efficiency),
    Constant("host seconds of a kernel, forward", "dispatch_forward_s"),
    Constant("host seconds of a kernel, backward", "dispatch_backward_s"),
    Constant("the host's share in the update", "_UPDATE_SHARE", efficiency),
    Constant("start of a collective", "_START_S", collectives),
    Constant("SMs that a collective takes", "_OCCUPIED_SHARE", overlap),
    Constant("deviation of GPUs' speeds", "_DEVIATION", stragglers),
    Constant("share of host memory's bandwidth", "_ATTAINED", host),
)


@contextmanager
def scaled(constant: Constant, factor: float) -> Iterator[None]:
    """Prices with a constant multiplied; shares stay below one."""
    module, name = constant.module, constant.name
    if module is not None:
        value: float = getattr(module, name)
        setattr(module, name, value * factor)
        yield
        setattr(module, name, value)
        return
    plain: Callable[[Gpu], Efficiency] = efficiency._by_datasheet
    known: dict[str, Efficiency] = efficiency._defaults

    def changed(gpu: Gpu) -> Efficiency:
        found = plain(gpu)
        value = getattr(found, name) * factor
        return found.replace(**{name: min(value, 1.0) if name.endswith("_share") else value})

    known.clear()
    efficiency._by_datasheet = changed
    yield
    efficiency._by_datasheet = plain
    known.clear()


def errors(job: Job) -> tuple[str, list[list[float]]] | None:
    """A row's source and place, and its errors for each factor of each constant; None where it has
    no speed."""
    try:
        (plain,) = Outcome(job).speed()
    except (Unreadable, InputError, ValueError):
        return None
    found: list[list[float]] = []
    for constant in CONSTANTS:
        each: list[float] = []
        for factor in FACTORS:
            if factor == 1.0:
                each.append(plain.error)
                continue
            with scaled(constant, factor):
                each.append(Outcome(job).speed()[0].error)
        found.append(each)
    return f"{plain.source}, {plain.place}", found


def sample(rows: Sequence[Row], count: int) -> list[Row]:
    """Up to so many rows of each source and number of GPUs, evenly over the table."""
    groups: dict[tuple[str, bool, bool], list[Row]] = {}
    for row in rows:
        gpus = row.whole("n_gpus", 1)
        key = (row.source.partition(":")[0], gpus > 1, gpus > 8)
        groups.setdefault(key, []).append(row)
    return [row for group in groups.values() for row in group[:: -(-len(group) // count)]]


Found = dict[str, list[list[list[float]]]]
"""Of each source: its rows, of each row the constants, of each constant the errors by factor."""


def line(index: int, found: Found) -> str:
    """A constant's row of the table."""
    constant = CONSTANTS[index]
    by_source = {source: [row[index] for row in rows] for source, rows in found.items()}
    felt = [s for s, rows in by_source.items() if _moved(rows) >= FELT]
    head = f"| {constant.meaning} | `{constant.place}` | {len(felt)} |"
    if not felt:
        return f"{head} - | - | - |"
    own = fmean(_error(by_source[s], FACTORS.index(1.0)) for s in felt)
    if len(felt) == 1:
        return f"{head} one source: not possible | {own:.1%} | - |"
    chosen = {s: _choice([by_source[other] for other in felt if other != s]) for s in felt}
    others = fmean(_error(by_source[s], factor) for s, factor in chosen.items())
    least, most = (FACTORS[f(chosen.values())] for f in (min, max))
    span = f"{least:g}" if least == most else f"{least:g} to {most:g}"
    return f"{head} {span} | {own:.1%} | {others:.1%} |"


def _moved(rows: Sequence[Sequence[float]]) -> float:
    return median(abs((1 + row[-1]) / (1 + row[0]) - 1) for row in rows)


def _error(rows: Sequence[Sequence[float]], factor: int) -> float:
    return median(abs(row[factor]) for row in rows)


def _choice(groups: Sequence[Sequence[Sequence[float]]]) -> int:
    """The factor of the least error; the value itself where another is no better."""
    plain = FACTORS.index(1.0)
    return min(
        range(len(FACTORS)),
        key=lambda factor: (
            round(fmean(_error(rows, factor) for rows in groups), 4),
            factor != plain,
        ),
    )


def table(found: Found) -> str:
    """All constants."""
    return "\n".join(
        (
            "| constant | file of `timing/` | sources that feel it | factor that the others choose"
            " | left out, at the value | left out, at that factor |",
            "|---|---|---|---|---|---|",
            *(line(index, found) for index in range(len(CONSTANTS))),
        )
    )


def _priced(asked: tuple[Path, int, int]) -> list[tuple[str, list[list[float]]]]:
    path, count, part = asked
    return list(_all(sample(read_rows(path), count)[part::WORKERS]))


def _all(rows: Iterable[Row]) -> Iterator[tuple[str, list[list[float]]]]:
    for row in rows:
        try:
            found = errors(understand(row))
        except (Unreadable, InputError):
            continue
        if found is not None:
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--throughput", type=Path, default=DATA / "throughput.csv")
    parser.add_argument("--rows", type=int, default=6, help="rows of each source and place")
    parser.add_argument("--out", type=Path, help="write the table to a file too")
    options = parser.parse_args()
    found: Found = {}
    with ProcessPoolExecutor(WORKERS) as pool:
        asked = [(options.throughput, options.rows, part) for part in range(WORKERS)]
        for priced in pool.map(_priced, asked):
            for source, row in priced:
                found.setdefault(source, []).append(row)
    shown = table(found)
    print(shown)
    if options.out is not None:
        options.out.write_text(shown + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
