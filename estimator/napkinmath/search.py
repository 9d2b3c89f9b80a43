"""Largest batch and longest context that fit: found by doubling and halving, each verified by one step more that does not fit."""

from __future__ import annotations

from napkinmath.errors import InputError, shown
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.train_config import TrainConfig

MOST_BATCH, MOST_CONTEXT = 1 << 16, 1 << 24


class Limit(Record):
    """How far a size can go: `fits` surely does (0: not even 1), `may_fit` is the last that the range does not exclude, one more does not fit."""

    what: str
    fits: int
    may_fit: int
    at: Estimate | None = None
    """The estimate at `fits`."""
    beyond: Estimate | None = None
    """The estimate one step beyond `fits`, which does not surely fit; None where the search's own end was reached."""


def largest_batch(e: Estimate) -> Limit:
    """The largest micro-batch that fits the estimate's GPU, everything else as it is."""
    return _limit(e, "batch", lambda config, size: config.replace(micro_batch_size=size * config.workload.sequences), MOST_BATCH)


def longest_context(e: Estimate) -> Limit:
    """The longest sequence that fits the estimate's GPU, to the token."""
    return _limit(e, "context", lambda config, size: config.replace(sequence_length=size), MOST_CONTEXT)


def same_but(e: Estimate, config: TrainConfig) -> Estimate:
    """The same model on the same machine under another configuration."""
    return estimate(e.spec, config, hardware=e.cluster or e.hardware, efficiency=e.speed, allocator=e.settings)


def _limit(e: Estimate, what: str, sized: Callable[[TrainConfig, int], TrainConfig], most: int) -> Limit:
    if e.hardware is None:
        raise InputError(f"the largest {shown(what)} that fits is a question about a GPU; add --gpu NAME")
    seen: dict[int, Estimate] = {}

    def at(size: int) -> Estimate:
        if size not in seen:
            seen[size] = same_but(e, sized(e.config, size))
        return seen[size]

    fits = last_that(lambda size: at(size).verdict is Verdict.FITS, most)
    may_fit = last_that(lambda size: at(size).verdict is not Verdict.DOES_NOT_FIT, most, low=fits)
    return Limit(
        what=what,
        fits=fits,
        may_fit=may_fit,
        at=at(fits) if fits else None,
        beyond=at(fits + 1) if fits < most else None,
    )


def last_that(holds: Callable[[int], bool], most: int, *, low: int = 0) -> int:
    """The largest whole number up to `most` for which a predicate that turns false once still holds; `low` is known to hold."""
    step = 1
    high = most + 1
    while low + step <= most:
        if not holds(low + step):
            high = low + step
            break
        low += step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
