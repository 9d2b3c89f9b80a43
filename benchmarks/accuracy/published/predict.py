"""Predictions for an understood row: the figures it was measured by, the verdict on its GPU, and
its speed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from napkinmath.answers.figures import Range
from napkinmath.answers.ranges import memory_ranges
from napkinmath.answers.speed_range import tokens_range
from napkinmath.answers.verdict import passes, verdict_on
from napkinmath.config.lengths import padded_share
from napkinmath.config.train_config import RecomputeKind
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.memory.simulate import simulate, steps_priced

from published.data_sets import counts_padding
from published.doubts import doubt, doubt_of_seconds
from published.identify import gpu_memory, slower_form
from published.machines import ONE_GPU
from published.rows import ALLOCATED, DEVICE, RESERVED, SPEED, Row, Unreadable
from published.understand import Job

# Verdicts of a range that straddles the capacity are settled by the replay under the limit itself.
_MEASURED_OUTSIDE = r"nvidia-smi|\bnvml\b|\bsmi\b|wandb|dcgm|reserved peak|incl\w* context"
_FITS = {Verdict.FITS: "fit", Verdict.DOES_NOT_FIT: "OOM"}


@dataclass(frozen=True)
class Prediction:
    """One figure of a row: predicted with its range, and measured, in `unit`."""

    row_id: str
    source: str
    quantity: str
    predicted: float
    low: float
    high: float
    measured: float
    unit: str
    place: str = ONE_GPU
    """One GPU, one node or many nodes."""

    @property
    def error(self) -> float:
        """Relative: +0.1 is predicted ten per cent too high."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the printed range."""
        return self.low <= self.measured <= self.high

    @property
    def width(self) -> float:
        """Width of the range over the prediction."""
        return (self.high - self.low) / self.predicted if self.predicted else 0.0


@dataclass(frozen=True)
class Judgement:
    """A fit/OOM verdict beside what happened."""

    row_id: str
    source: str
    predicted: str
    actual: str


class Outcome:
    """An understood row priced."""

    def __init__(self, job: Job, priced: Estimate | None = None) -> None:
        self.job = job
        self.estimate: Estimate = priced or estimate(
            job.spec,
            job.config,
            hardware=job.cluster or job.hardware,
            allocator=job.era.allocator,
        )

    def for_job(self, job: Job) -> Outcome:
        """The same estimate read for another row of the same run."""
        return Outcome(job, self.estimate)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was assumed, and whether the unit of memory figures is sure (GB of 10^9 or 2^30
        bytes)."""
        return (*self.job.assumed, *(() if self.job.row.unit_is_sure else ("unit",)))

    @property
    def doubt_of_speed(self) -> tuple[float, float]:
        """(below, above) of the step's seconds by what was assumed; checkpointing that was assumed
        can only be missing, none only be there."""
        unnamed = gpu_memory(self.job.row) is None
        bare = "form" in self.doubts
        form = slower_form(self.job.hardware.gpu, any_memory=unnamed) if bare else 0.0
        below, above = self._doubt_of_cells
        return below, (above**2 + form**2) ** 0.5

    @property
    def _doubt_of_cells(self) -> tuple[float, float]:
        below, above = doubt_of_seconds(self.doubts)
        if "checkpointing" in self.doubts:
            rest = doubt_of_seconds(name for name in self.doubts if name != "checkpointing")
            plain = self.job.config.recompute.kind is RecomputeKind.NONE
            return (rest[0], above) if plain else (below, rest[1])
        return below, above

    def memory(self) -> list[Prediction]:
        """Predictions of every memory figure the row has."""
        row, memory = self.job.row, memory_ranges(self.of_measured_rank(), doubt(self.doubts))
        ranges = {ALLOCATED: memory.allocated, RESERVED: memory.reserved, DEVICE: memory.device}
        if logged := self.logged():
            # the kind is not stated: what the tool's log prints, and up to what the device shows
            span = ranges[logged]
            ranges[DEVICE] = Range(low=span.low, value=span.value, high=memory.device.high)
        ranks = row.whole("n_gpus", 1) if row.words("mem_scope").startswith(("sum", "total")) else 1
        return [
            self._prediction(quantity, ranges[quantity], value / ranks, row.bytes_per_unit)
            for quantity, value in row.measured()
        ]

    def of_measured_rank(self) -> Estimate:
        """The estimate of the rank whose memory was read: the one that needs most, or a pipeline's
        first."""
        whole = self.estimate
        pipelined = self.job.config.parallel.pipeline_parallel_size > 1
        if not pipelined or self.job.row.words("mem_scope") != "first pipeline rank":
            return whole
        step = whole.ranks.step(0)
        return Estimate(
            whole.ranks,
            whole.config,
            step,
            simulate(step, None, steps=steps_priced(whole.config)),
            hardware=whole.hardware,
            speed=None,
            settings=whole.settings,
            cluster=whole.cluster,
        )

    def logged(self) -> str:
        """The kind of memory that the tool's own log prints, where the row names no other."""
        text = self.job.row.words("mem_unit", "notes")
        return "" if re.search(_MEASURED_OUTSIDE, text) else self.job.era.logs

    def speed(self) -> list[Prediction]:
        """Prediction of tokens a second, where the row has it."""
        parallel = self.job.config.parallel
        replicas, ranks = parallel.data_parallel_size, parallel.world_size
        share = replicas / ranks  # a replica's tokens are the work of all its ranks
        counted = 1.0
        if self.job.config.batch.lengths and counts_padding(self.job.row):
            counted = 1 / (
                1
                - padded_share(self.job.config.batch.lengths, self.job.row.whole("micro_batch", 1))
            )
        measured = measured_speed(self.job.row, share)
        span = tokens_range(self.estimate, self.doubt_of_speed)
        if measured is None:
            return []
        if "method" in self.job.assumed and self.job.config.adapter is not None:
            raise Unreadable(f"the speed of method {self.job.row['method']!r} has no rule")
        if span is None:
            raise Unreadable(f"the speed of GPU {self.job.row['gpu']!r} is not known")
        each = share * counted
        per_gpu = Range(low=span.low * each, value=span.value * each, high=span.high * each)
        return [self._prediction(SPEED, per_gpu, measured, 1)]

    def judgement(self) -> Judgement | None:
        """The verdict, where the row says whether the run fitted a GPU of known memory."""
        row = self.job.row
        if gpu_memory(row) is None:
            return None
        return Judgement(
            row.row_id, row.source, self._verdict(), "OOM" if row.status == "OOM" else "fit"
        )

    def _verdict(self) -> str:
        hardware = self.estimate.hardware or self.job.hardware
        found = verdict_on(self.estimate, hardware)
        if found in _FITS:
            return _FITS[found]
        return "fit" if passes(self.estimate, hardware.usable_bytes) else "OOM"

    def _prediction(self, quantity: str, span: Range, measured: float, per_unit: int) -> Prediction:
        row = self.job.row
        unit = "tokens/s" if quantity == SPEED else "GiB" if per_unit == 1 << 30 else "GB"
        return Prediction(
            row.row_id,
            row.source,
            quantity,
            span.value / per_unit,
            span.low / per_unit,
            span.high / per_unit,
            measured,
            unit,
            self.job.place,
        )


def measured_speed(row: Row, replicas_per_gpu: float = 1.0) -> float | None:
    """Tokens a second of one GPU: as given, or a step's tokens over its seconds."""
    for column in ("tokens_per_s_per_gpu", "tokens_per_s_total"):
        value = row.number(column)
        if value:
            return value if column.endswith("gpu") else value / row.whole("n_gpus", 1)
    seconds = row.number("step_time_s")
    if seconds and row["seq_len"].strip():
        return (
            row.whole("micro_batch", 1)
            * row.whole("seq_len")
            * row.whole("grad_accum", 1)
            * replicas_per_gpu
            / seconds
        )
    return None
