"""Largest batch and longest context by the requested peak alone: what the report can afford beside
one estimate.

The peak is evaluated exactly at each size that is tried; what the allocator adds is taken to stay
the share that it is in the estimate at hand. `estimate batch` and `estimate context` replay the
allocator at every size instead (napkinmath.planning.search).
"""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.base.expr import Bindings
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.memory.simulate import simulate, steps_priced
from napkinmath.models.read import read_teacher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.step import Step

MOST_BATCH, MOST_CONTEXT = 1 << 16, 1 << 24


class Largest:
    """Sizes at which the step still surely fits the estimate's GPU; None where the question has no
    one answer."""

    def __init__(self, e: Estimate) -> None:
        self.e = e
        self.step = e.step
        bind = Bindings(e.step.symbols)
        self.sizes: tuple[int, int] = bind(e.step.symbols["b"]), bind(e.step.symbols["s"])
        self._steps: dict[tuple[bool, ...], Step] = {self._side(*self.sizes): e.step}
        assert e.hardware is not None
        allocated = e.memory.allocated
        low_usable, _ = e.hardware.usable_range
        self._limit = low_usable * e.peak.nbytes / max(allocated.high, 1)

    def batch(self) -> int:
        """The largest micro-batch at the estimate's context; 0 where not even one sequence fits."""
        batch, length = self.sizes
        return self._held(batch, lambda size: self._peak(size, length), MOST_BATCH)

    def context(self) -> int:
        """The longest context at the estimate's micro-batch, in tokens of the batch; 0 where not
        even one fits."""
        batch, length = self.sizes
        own = self.e.config.sequence_length
        virtual = length - own if isinstance(own, int) else 0  # a prompt's tokens
        found = max(
            0, self._held(length, lambda size: self._peak(batch, size), MOST_CONTEXT) - virtual
        )
        return min(found, self.e.spec.longest_sequence or found)

    def _held(self, size: int, peak: Callable[[int], int], most: int) -> int:
        """The last size within the limit, from the size at hand, whose verdict is known."""
        limit = self._limit
        fits = self.e.verdict is Verdict.FITS
        low, at_low = (size, self.e.peak.nbytes) if fits else (0, 0)
        high, at_high = (size, self.e.peak.nbytes) if not fits else (size * 2, peak(size * 2))
        while at_high <= limit and high < most and fits:
            low, at_low = high, at_high
            high = min(most, high * 2)
            at_high = peak(high)
        if fits and at_high <= limit:
            return high
        share = (limit - at_low) / (at_high - at_low) if at_low and at_high > at_low else 0.5
        tried, reach = (
            low + int((high - low) * share),
            1,
        )  # on the chord, which a nearly straight line meets within a few
        while high - low > 1:
            tried = min(high - 1, max(low + 1, tried))
            if peak(tried) <= limit:
                low, tried = tried, tried + reach
            else:
                high, tried = tried, tried - reach
            reach = reach * 4 if reach * 4 < high - low else max(1, (high - low) // 2)
        return low

    def _peak(self, batch: int, length: int) -> int:
        """Requested bytes at the peak of a step of that size."""
        side = self._side(batch, length)
        step = self._steps.get(side)
        if step is None:
            e = self.e
            config = e.config.replace(micro_batch_size=batch, sequence_length=length)
            policy = resolve(e.spec, config, e.hardware, teacher=read_teacher(config))
            step = self._steps[side] = build_step(e.spec, policy)
        before = step.symbols
        target = self.e.config.batch.target_length
        step.symbols = {**before, "b": batch, "s": length, "st": target or length}
        try:
            return simulate(step, None, steps=steps_priced(self.e.config)).peak().nbytes
        finally:
            step.symbols = before

    def _side(self, batch: int, length: int) -> tuple[bool, ...]:
        """On which side of each size at which the library runs other operations."""
        thresholds = self.step.thresholds
        sizes = {"b": batch, "s": length}
        return tuple(
            sizes[symbol] >= value
            for symbol in sorted(thresholds)
            for value in sorted(thresholds[symbol])
        )


def is_asked(e: Estimate) -> bool:
    """Whether there is one GPU, and sizes that are numbers: else the question has no one answer."""
    config, parallel = e.config, e.config.parallel
    ranks = (
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.context_parallel_size
        * parallel.data_parallel_size
    )
    numbers = isinstance(config.micro_batch_size, int) and isinstance(config.sequence_length, int)
    return e.hardware is not None and numbers and ranks == 1 and not config.batch.lengths


def largest(e: Estimate) -> tuple[int, int] | None:
    """(largest batch, longest context), each with the other as it is; None without one GPU and
    sizes that are numbers."""
    if not is_asked(e):
        return None
    found = Largest(e)
    return found.batch(), found.context()
