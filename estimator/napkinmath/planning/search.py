"""Largest batch and longest context that fit: the one search behind the report, `--json`, `plan
--max-bs`, the page and Python.

Each size that is tried is judged by the verdict's own rule, a replay under the device's limit. So
the size found fits when it is run, and one more does not.
"""

from __future__ import annotations

from functools import cached_property

from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import named_bytes
from napkinmath.answers.verdict import passes, room_for
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.base.units import MIB
from napkinmath.estimate import estimate
from napkinmath.ir.step import reads_tokens
from napkinmath.memory.allocator_settings import UNLIMITED
from napkinmath.memory.replay import replay
from napkinmath.planning.bound_steps import BoundSteps, Trial, judged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig

MOST_BATCH, MOST_CONTEXT = 1 << 16, 1 << 24
# Which holes the allocator finds differs from size to size by some segments: this far below a limit
# a smaller size can fail where a larger one fits (8B in 16 bits on 80 GB: 130 MiB).
UNEVEN_BYTES = 1024 * MIB
# Events that the estimate's own replay and those of the search may play: some 2 s of a 2.5 GHz core.
# Models of 10,000 linears and more take them up alone; `plan --max-bs` and `--max-ctx` go on.
MOST_EVENTS = 2_500_000
NARROW = 64  # sizes of a bracket that is halved
PROBES = 4  # on one GPU; gathered units leave more holes, so on several twice as many are tried


class Reach(Record):
    """How far a size can go: `size` fits (0: not even 1), and one more does not, unless it is the
    `most` that is asked about.

    `uneven`: a larger size fits again, which the allocator makes so; every size tried below fits.
    `failing`: the least size known not to fit; above `size + 1` the search has ended early.
    """

    what: str
    size: int
    most: int
    uneven: bool = False
    failing: int = 0

    @property
    def ended_early(self) -> bool:
        """Whether sizes between the largest that fits and the least that does not were not tried,
        because a trial takes seconds."""
        return self.failing > self.size + 1


class Limit(Record):
    """How far a size can go: `fits` surely does (0: not even 1), `may_fit` is the last that the
    range does not exclude, one more does not fit."""

    what: str
    fits: int
    may_fit: int
    uneven: bool = False
    at: Estimate | None = None
    """The estimate at `fits`."""
    beyond: Estimate | None = None
    """The estimate one step beyond `fits`, which does not surely fit; None where the search's own
    end was reached."""


def largest_batch(e: Estimate) -> Limit:
    """The largest batch that fits the estimate's GPU, everything else as it is."""
    return _limit(e, "batch")


def longest_context(e: Estimate) -> Limit:
    """The longest sequence that fits the estimate's GPU, to the token."""
    return _limit(e, "context")


def reaches(e: Estimate) -> tuple[Reach, ...]:
    """What surely fits of batch and context, each with the other as it is.

    Empty where the question has no one answer (no GPU, several ranks, lengths that change, memory
    of a job file that is not priced), and without the context where the model reads no tokens.
    """
    if not is_asked(e) or e.takes_more:
        return ()
    return reached(e)


def reached(e: Estimate) -> tuple[Reach, ...]:
    """The same of any estimate with a GPU, also on several GPUs: of the rank that needs most."""
    names = ("batch", "context") if reads_tokens(e.step) else ("batch",)
    steps = _bound_steps(e, MOST_EVENTS)
    return tuple(_Search(e, what, steps, sure=True).reach() for what in names)


def is_asked(e: Estimate) -> bool:
    """Whether there is one GPU, and sizes that are numbers: else the question has no one answer."""
    config, parallel = e.config, e.config.parallel
    numbers = isinstance(config.micro_batch_size, int) and isinstance(config.sequence_length, int)
    one = parallel.world_size * parallel.context_parallel_size == 1
    return e.hardware is not None and numbers and one and not config.batch.lengths


def same_but(e: Estimate, config: TrainConfig) -> Estimate:
    """The same model on the same machine under another configuration."""
    return estimate(
        e.spec, config, hardware=e.cluster or e.hardware, efficiency=e.speed, allocator=e.settings
    )


def _limit(e: Estimate, what: str) -> Limit:
    if e.hardware is None:
        raise InputError(
            f"the largest {shown(what)} that fits is a question about a GPU; add --gpu NAME"
        )
    if what == "context" and not reads_tokens(e.step):
        raise InputError(
            f"{e.spec.name} reads images and has no context; leave out --max-ctx, or use --max-bs"
        )
    if what == "context" and e.config.batch.lengths:
        raise InputError(
            "--lengths says how long sequences are; leave it out, or ask for --max-bs instead of --max-ctx"
        )
    steps = _bound_steps(e, UNLIMITED)
    search = _Search(e, what, steps, sure=True)
    found = search.reach()
    may_fit = _Search(e, what, steps, sure=False, low=found.size).reach().size
    size = found.size
    return Limit(
        what=what,
        fits=size,
        may_fit=may_fit,
        uneven=found.uneven,
        at=search.estimate(size) if size else None,
        beyond=search.estimate(size + 1) if size < found.most else None,
    )


class _Search:
    """One size of an estimate varied, everything else as it is, until the step no longer fits."""

    def __init__(
        self, e: Estimate, what: str, steps: BoundSteps | None, *, sure: bool, low: int = 0
    ) -> None:
        assert e.hardware is not None
        self.e, self.what, self.sure = e, what, sure
        self.most: int = (
            MOST_BATCH if what == "batch" else (e.spec.longest_sequence or MOST_CONTEXT)
        )
        self.room = room_for(e.hardware, e.config.parallel.world_size, sure=sure)
        self.low: int = low
        """Fits, or is 0; `high` does not fit."""
        self.high: int = self.most + 1
        self._steps = steps
        self._tried: dict[int, Trial] = {}
        self._mark_own_size()

    def reach(self) -> Reach:
        """The size at which the limit is crossed; where the allocator makes the crossing uneven,
        the lowest that was found. It ends early where the events that may be played are over."""
        self._close()
        uneven = False
        while failing := self._failing_below():
            uneven = True
            self.low, self.high = self._last_good_below(failing), failing
            self._close()
        return Reach(
            what=self.what, size=self.low, most=self.most, uneven=uneven, failing=self.high
        )

    def estimate(self, size: int) -> Estimate:
        """The whole answer at a size."""
        return same_but(self.e, self._sized(size))

    # ------------------------------------------------------------ one size

    def _limit(self, config: TrainConfig) -> int:
        """Bytes to reserve: what is named as not priced may take a part of what surely is there."""
        return self.room - (named_bytes(self.e, config) if self.sure else 0)

    def _sized(self, size: int) -> TrainConfig:
        config = self.e.config
        if self.what == "context":
            return config.replace(sequence_length=size)
        return config.replace(micro_batch_size=size * config.workload.sequences)

    def _trial(self, size: int) -> Trial | None:
        """What a size leaves or lacks; None where the events that may be played are over."""
        found = self._tried.get(size)
        if found is None and (found := self._try(size)) is not None:
            self._tried[size] = found
        return found

    def _try(self, size: int) -> Trial | None:
        try:
            config = self._sized(size)
            if self._steps is not None:
                return self._bound_trial(self._steps, config, size)
            e = same_but(self.e, config)
        except InputError:  # a size that the model or the mesh refuses
            return Trial(fits=False, left=0)
        limit = self._limit(config)
        if e.lengths_change:  # the verdict goes by several orders of them
            return Trial(fits=passes(e, limit), left=limit - e.replay.peak_unreturnable)
        books = replay(e.timeline, self.e.settings.replace(limit_bytes=limit))
        return judged(books, limit)

    def _bound_trial(self, steps: BoundSteps, config: TrainConfig, size: int) -> Trial | None:
        """A trial of the step bound anew. In a wide bracket all that lacks is looked for: the first
        request that fails says less."""
        limit = self._limit(config)
        peak, wide = steps.peak(config), self.high - self.low > NARROW and size > self.low + 1
        may_replay = steps.may_replay
        if peak > 2 * limit or (peak > limit and not (wide and may_replay)):
            return Trial(fits=False, left=limit - peak)
        if not may_replay:
            return None
        trial = None if peak > limit else steps.trial(config, limit)
        if trial is not None and not (trial.lacks_more and wide):
            return trial
        return Trial(fits=False, left=min(-1, limit - steps.need(config)))

    def _mark_own_size(self) -> None:
        """The estimate at hand has been judged already."""
        config, own = self.e.config, None
        sequences = config.workload.sequences
        own = config.sequence_length if self.what == "context" else config.micro_batch_size
        if not isinstance(own, int) or (self.what == "batch" and own % sequences):
            return
        own = own if self.what == "context" else own // sequences
        good = (Verdict.FITS,) if self.sure else (Verdict.FITS, Verdict.UNKNOWN)
        fits = self.e.priced_verdict in good
        left = self._limit(config) - self.e.replay.peak_unreturnable
        self._tried[own] = Trial(fits=fits, left=left)
        if fits and own <= self.most:
            self.low = max(self.low, own)
        elif not fits:
            self.high = min(self.high, own)

    # ------------------------------------------------------------ the search

    def _close(self) -> None:
        """Narrows the bracket until its ends are neighbours: each trial moves on by the bytes that
        it left or lacked, twice as far each time that the same end moves again. A narrow bracket is
        halved: within it bytes go up and down by the allocator's holes."""
        size, stride, before = self._guess(), 1, None
        while self.high - self.low > 1:
            if not self.low < size < self.high or self.high - self.low <= NARROW:
                size = (self.low + self.high) // 2
            trial = self._trial(size)
            if trial is None:
                return
            if trial.fits:
                self.low = size
            else:
                self.high = size
            stride, before = (stride * 2 if trial.fits is before else 1), trial.fits
            steps = max(1, abs(trial.left) // self._bytes_each()) * stride
            size = min(size + steps, self.most) if trial.fits else max(size - steps, 1)

    def _bytes_each(self) -> int:
        """Bytes that one more takes: along the chord between both ends, as soon as there is one."""
        low, high = self._tried.get(self.low), self._tried.get(self.high)
        if low is None or high is None or low.left <= 0 or high.left >= 0:
            return self._slope
        return max(1, (low.left - high.left) // (self.high - self.low))

    @cached_property
    def _slope(self) -> int:
        """Bytes that one more requests, at least 1."""
        at = max(self.low, min(self.high, self.most) // 2, 1)
        wider = at + max(1, at // 16)
        rise = self._requested(wider) - self._requested(at)
        return max(1, rise // (wider - at))

    def _requested(self, size: int) -> int:
        """Requested bytes at the peak of a step of that size."""
        config = self._sized(size)
        return self._steps.peak(config) if self._steps else same_but(self.e, config).peak.nbytes

    def _guess(self) -> int:
        """Where the limit should be, from the estimate at hand along its slope."""
        for size in (self.low, self.high):
            if (trial := self._tried.get(size)) is not None:
                return min(self.most, max(1, size + trial.left // self._slope))
        return max(1, self.low)

    def _failing_below(self) -> int:
        """The lowest size that fails of a few tried below the size found, as far as the allocator's
        unevenness reaches; 0 where all fit, as they do where twice as much is left."""
        own = self._tried.get(self.low)
        if own is not None and own.left > 2 * UNEVEN_BYTES:  # the model ends here, not the memory
            return 0
        reach = max(0, min(UNEVEN_BYTES // self._slope, self.low - 1))
        apart = 1 if self._steps is None else 2
        sizes = {self.low - (reach >> k) for k in range(0, 2 * PROBES, apart) if reach >> k}
        tried = ((size, self._trial(size)) for size in sorted(sizes))
        return next((size for size, trial in tried if trial is not None and not trial.fits), 0)

    def _last_good_below(self, failing: int) -> int:
        return max((n for n, t in self._tried.items() if t.fits and n < failing), default=0)


def _bound_steps(e: Estimate, most_events: int) -> BoundSteps | None:
    """The steps of an estimate's sizes; None where each size is an estimate of its own."""
    return BoundSteps(e, most_events) if is_asked(e) else None
