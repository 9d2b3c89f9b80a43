"""The whole run: steps, hours and money of a training whose length is said."""

from __future__ import annotations

from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate


class WholeRun(Record):
    """A training from its first step to its last, without evaluation, saving and starting."""

    steps: int
    tokens: int
    seconds: float
    fastest_s: float
    slowest_s: float
    gpus: int

    @property
    def gpu_hours(self) -> float:
        """Hours times GPUs."""
        return self.seconds / 3600 * self.gpus


def whole_run(e: Estimate) -> WholeRun | None:
    """The run of an estimate; None where its length is not said or the hardware has no known
    speed."""
    whole, time = e.throughput, e.time
    if whole is None or time is None or not e.config.run.is_known or has_unknown_rows(e):
        return None
    from napkinmath.answers.speed_range import tokens_range

    steps = num_steps(e)
    span = tokens_range(e)
    speeds = (time.tokens_per_s,) * 2 if span is None else (span.low, span.high)
    seconds = steps * whole.seconds
    return WholeRun(
        steps=steps,
        tokens=steps * whole.tokens,
        seconds=seconds,
        fastest_s=seconds * time.tokens_per_s / speeds[1],
        slowest_s=seconds * time.tokens_per_s / speeds[0],
        gpus=whole.gpus,
    )


def has_unknown_rows(e: Estimate) -> bool:
    """Whether the run's length is counted in samples that are packed, of lengths not known."""
    run, batch = e.config.run, e.config.batch
    return bool(run.samples) and not run.max_steps and batch.packing and not batch.lengths


def num_steps(e: Estimate) -> int:
    """Optimizer steps of a run whose length is said; packed samples fill rows by their lengths."""
    config, run = e.config, e.config.run
    batch, length = config.micro_batch_size, config.sequence_length
    assert isinstance(batch, int) and isinstance(length, int)
    rows = max(1, batch // config.workload.sequences) * config.parallel.data_parallel_size
    lengths = config.batch.lengths
    if config.batch.packing and lengths and run.samples:
        mean = sum(min(n, length) for n in lengths) / len(lengths)
        run = run.replace(samples=-int(-run.samples * mean // length))
    micro_steps = config.parallel.num_micro_batches or config.gradient_accumulation_steps
    return run.steps(rows, micro_steps)
