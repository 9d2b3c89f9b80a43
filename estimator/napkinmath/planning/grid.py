"""Grid: many jobs at once. Jobs that differ in batch, length and rank only share one record of the
step and are priced as arrays.

What cannot be left open (several GPUs, sequences of varied lengths, sizes that would overflow 64
bits) goes through `estimate` job by job.
"""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import headroom_bytes
from napkinmath.answers.verdict import as_priced, room_for
from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.base.installing import pip_install
from napkinmath.base.progress import counted
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import estimate
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.several import OPEN, expand, inner_values, several
from napkinmath.models.tasks import PICTURED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from napkinmath.base.expr import Size
    from napkinmath.config.hardware import Hardware
    from napkinmath.planning.sweep import Sweeper

# Beyond these tokens, and tokens times length, a sum of bytes or FLOPs might leave 64 bits: priced
# with Python's own numbers instead.
MOST_TOKENS, MOST_SCORES = 1 << 31, 1 << 44
# The most that an allocator held beyond the requested bytes, over what was replayed: 1.23 times
# (docs/answers.md).
MOST_HELD = 1.25
FAST = ("requested_bytes", "peak_phase", "seconds", "tokens_per_s", "verdict")
EXACT = (
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "device_bytes",
    "headroom_bytes",
    "peak_phase",
    "seconds",
    "tokens_per_s",
    "verdict",
)
MONEY = ("gpu_hours_per_billion", "price_per_billion")


class Family:
    """Jobs alike in everything but batch, length and rank, on one GPU; `notes` receives what was
    decided for the user."""

    def __init__(self, options: Mapping[str, object], notes: list[str]) -> None:
        found = priced(options, notes)
        if len(found) > 1:
            raise InputError("several GPUs in one job; give one job for each")
        self.options, self.template = dict(options), found[0]
        self._sweeper: Sweeper | None = None

    @property
    def config(self) -> TrainConfig:
        """The configuration with the first job's sizes."""
        return self.template.config

    @property
    def is_open(self) -> bool:
        """Whether batch, length and rank may be left open in one record."""
        config = self.config
        alone = config.parallel.world_size == 1 and not config.offload.parameters
        return (
            alone
            and not config.batch.lengths
            and "arch" not in self.options
            and getattr(self.template, "calibration", None) is None
        )

    @property
    def has_own_length(self) -> bool:
        """Whether a sequence is an image's patches, which no context changes."""
        return self.template.spec.task in PICTURED

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, length and rank of the first job."""
        config = self.config
        rank = number(config.adapter.rank) if config.adapter is not None else 1
        return (
            number(config.micro_batch_size) // config.workload.sequences,
            number(config.sequence_length),
            rank,
        )

    def sized(self, batch: int, length: int, rank: int) -> TrainConfig:
        """The configuration with these sizes."""
        length = self.sizes[1] if self.has_own_length else length
        config = self.config.replace(
            micro_batch_size=batch * self.config.workload.sequences, sequence_length=length
        )
        return (
            config
            if config.adapter is None
            else config.replace(adapter=config.adapter.replace(rank=rank))
        )

    def estimate(self, batch: int, length: int, rank: int) -> Estimate:
        """One job through `estimate`."""
        e = self.template
        found = estimate(
            e.spec,
            self.sized(batch, length, rank),
            hardware=e.cluster or e.hardware,
            efficiency=e.speed,
            allocator=e.settings,
            calibration=e.calibration,
        )
        return found if e.job_keys is None else found.of_job(e.job_keys)

    def exactly(self, batch: int, length: int, rank: int) -> dict[str, Any]:
        """Every figure of one job, the allocator replayed."""
        return figures(self.estimate(batch, length, rank))

    def quickly(
        self, batches: Sequence[int], lengths: Sequence[int], ranks: Sequence[int]
    ) -> Iterator[tuple[Any, ...]]:
        """Rows of FAST, one for each job given by three equally long sequences."""
        import numpy as np

        lengths = [self.sizes[1]] * len(lengths) if self.has_own_length else lengths
        b, s, r = (np.asarray(column, np.float64) for column in (batches, lengths, ranks))
        b *= self.config.workload.sequences  # a pair of sequences is one of the batch
        if not self.is_open or bool((b * s > MOST_TOKENS).any() or (b * s * s > MOST_SCORES).any()):
            for sizes in zip(batches, lengths, ranks, strict=True):
                yield self._one(self.estimate(*sizes))
            return
        from napkinmath.planning.sweep import PHASES

        cells = [column.astype(np.int64) for column in (b, s, r)]
        where: Any = None
        if b.size > 1 and b.max() < 1 << 24:  # equal sizes once: the three fit 63 bits
            _, first, where = np.unique(
                cells[0] << 39 | cells[1] << 17 | cells[2], return_index=True, return_inverse=True
            )
            cells = [column[first] for column in cells]
        found = self.sweeper(*cells)
        columns: list[Any] = [
            found.requested,
            np.array([phase.value for phase in PHASES], object)[found.winner],
        ]
        nothing = np.full(len(cells[0]), None)
        columns += [
            nothing if column is None else column for column in (found.seconds, found.tokens_per_s)
        ]
        columns.append(self.verdicts(found.requested))
        yield from zip(
            *((column if where is None else column[where]).tolist() for column in columns),
            strict=True,
        )

    def _one(self, e: Estimate) -> tuple[Any, ...]:
        """The row of FAST of one estimate, without a replay."""
        requested, time = e.peak.nbytes, e.time
        phase = next(iter(e.phase_peaks)).value
        seconds, speed = (None, None) if time is None else (time.seconds, tokens_per_s(e))
        return requested, phase, seconds, speed, self._verdict(requested)

    def _verdict(self, requested: int) -> str | None:
        """What requested bytes alone tell: more than the device has surely do not fit, 1 /
        MOST_HELD of it surely do."""
        hardware, ranks = self.template.hardware, self.config.parallel.world_size
        if hardware is None:
            return None
        if requested > room_for(hardware, ranks, sure=False):
            return self._told(Verdict.DOES_NOT_FIT)
        surely = requested * MOST_HELD <= room_for(hardware, ranks, sure=True)
        return self._told(Verdict.FITS if surely else Verdict.UNKNOWN)

    def _told(self, verdict: Verdict) -> str:
        return as_priced(verdict, self.template.job_keys).value

    @property
    def sweeper(self) -> Sweeper:
        """The record of the step with its sizes open, made when first used."""
        if self._sweeper is None:
            from napkinmath.planning.sweep import Sweeper

            self._sweeper = Sweeper(
                self.template.spec, self.config, self.template.hardware, self.template.speed
            )
        return self._sweeper

    def verdicts(self, requested: Any) -> Any:
        """The same of many."""
        import numpy as np

        hardware, ranks = self.template.hardware, self.config.parallel.world_size
        if hardware is None:
            return np.full(len(requested), None)
        low, high = (room_for(hardware, ranks, sure=sure) for sure in (True, False))
        names = np.array(
            [self._told(v) for v in (Verdict.UNKNOWN, Verdict.FITS, Verdict.DOES_NOT_FIT)], object
        )
        return names[np.where(requested > high, 2, np.where(requested * MOST_HELD <= low, 1, 0))]


def number(size: Size) -> int:
    """A size that is a number, not a symbol."""
    assert isinstance(size, int)
    return size


def tokens_per_s(e: Estimate) -> float | None:
    """Of all GPUs together."""
    if e.config.parallel.world_size > 1 and e.throughput is not None:
        return e.throughput.tokens_per_s
    return None if e.time is None else e.time.tokens_per_s


def figures(e: Estimate) -> dict[str, Any]:
    """The figures of an estimate under the names of EXACT."""
    time, memory = e.time, e.memory
    return {
        "requested_bytes": e.peak.nbytes,
        "allocated_bytes": int(memory.allocated.value),
        "reserved_bytes": int(memory.reserved.value),
        "device_bytes": int(memory.device.value),
        "headroom_bytes": headroom_bytes(e),
        "peak_phase": next(iter(e.phase_peaks)).value,
        "seconds": None if time is None else time.seconds,
        "tokens_per_s": None if time is None else tokens_per_s(e),
        "verdict": None if e.hardware is None else e.verdict.value,
    }


class Grid:
    """Every combination of options with several values: `keys` vary, `names` are the columns,
    `rows` the jobs in order.

    `values` has those of each key. A combination that contradicts itself is left out, its reason counted in `refused`; `hardware`
    has the GPUs named once rows were made. With a `price` of an hour of one GPU, rows end with what
    a billion tokens take.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        notes: list[str],
        *,
        exact_below: int = 64,
        exact: bool = False,
        price: float | None = None,
    ) -> None:
        self.keys, self._outer, self._inner = expand(options)
        self.values = {key: several(key, options[key]) for key in self.keys}
        self.refused: dict[str, int] = {}
        self.hardware: dict[str, Hardware] = {}
        self.summary = ", ".join(
            f"{key} {several(key, value)[0]}"
            for key, value in options.items()
            if key not in self.keys
        )
        self._notes = notes
        self.exact = exact or self.num_jobs <= exact_below
        self.price = price
        self.names = (
            *self.keys,
            *(EXACT if self.exact else FAST),
            *(() if price is None else MONEY),
        )

    @property
    def num_jobs(self) -> int:
        """Jobs at most: those refused are among them."""
        total = 0
        for options in self._outer:
            count = 1
            for _, found in inner_values(self._inner, options):
                count *= len(found)
            total += count
        return total

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One row a job: the options that vary, then the figures."""
        return counted(self._rows(), "jobs", self.num_jobs)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for options in self._outer:
            inner = dict(inner_values(self._inner, options))
            try:
                yield from self._family_rows(options, inner)
            except InputError as error:
                self.refused[str(error)] = self.refused.get(str(error), 0) + 1

    def _family_rows(
        self, options: dict[str, object], inner: dict[str, list[object]]
    ) -> Iterator[tuple[Any, ...]]:
        sizes = {
            key: [values.count(value, "--" + key) for value in found]
            for key, found in inner.items()
        }
        family = Family({**options, **{key: found[0] for key, found in sizes.items()}}, self._notes)
        if family.template.hardware is not None:
            self.hardware[family.template.hardware.gpu.name] = family.template.hardware
        batches, lengths, ranks = (
            sizes.get(key, [own]) for key, own in zip(OPEN, family.sizes, strict=True)
        )
        jobs = [(b, s, r) for b in batches for s in lengths for r in ranks]
        columns = [[job[i] for job in jobs] for i in range(3)]
        labels = [
            columns[OPEN.index(key)] if key in sizes else [options.get(key)] * len(jobs)
            for key in self.keys
        ]
        priced = (
            (self._exact_row(family, job) for job in jobs)
            if self.exact
            else family.quickly(*columns)
        )
        for label, row in zip(
            zip(*labels, strict=True) if labels else [()] * len(jobs), priced, strict=True
        ):
            yield (*label, *row, *self._money(family, row))

    def _money(self, family: Family, row: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.price is None:
            return ()
        speed = row[(EXACT if self.exact else FAST).index("tokens_per_s")]
        if not speed:
            return None, None
        from napkinmath.answers.throughput import gpu_hours_per_billion

        hours = gpu_hours_per_billion(speed, family.config.parallel.world_size)
        return hours, hours * self.price

    @staticmethod
    def _exact_row(family: Family, job: tuple[int, int, int]) -> tuple[Any, ...]:
        found = family.exactly(*job)
        return tuple(found[name] for name in EXACT)


def frame(options: Mapping[str, object], *, exact: bool = False) -> Any:
    """A pandas DataFrame with one row for every combination of the options, e.g. {"model":
    "llama-7b", "bs": "1..64", "ctx": "1k,2k"}.

    `exact` replays the allocator for every job instead of giving requested bytes only. Raises
    InputError where pandas is missing.
    """
    try:
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise InputError(f"a DataFrame needs pandas: {pip_install('plots')}") from None
    grid = Grid(options, [], exact=exact, exact_below=0)
    return pd.DataFrame(grid.rows(), columns=list(grid.names))
