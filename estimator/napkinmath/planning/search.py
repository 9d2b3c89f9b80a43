"""Largest batch and longest context that fit: guessed by requested bytes, bracketed and halved,
verified by one step more that does not fit."""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.estimate import estimate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.config.train_config import TrainConfig

MOST_BATCH, MOST_CONTEXT = 1 << 16, 1 << 24
MOST_SECANTS = 4


class Limit(Record):
    """How far a size can go: `fits` surely does (0: not even 1), `may_fit` is the last that the
    range does not exclude, one more does not fit."""

    what: str
    fits: int
    may_fit: int
    at: Estimate | None = None
    """The estimate at `fits`."""
    beyond: Estimate | None = None
    """The estimate one step beyond `fits`, which does not surely fit; None where the search's own
    end was reached."""


def largest_batch(e: Estimate) -> Limit:
    """The largest micro-batch that fits the estimate's GPU, everything else as it is."""
    return _limit(
        e,
        "batch",
        lambda config, size: config.replace(micro_batch_size=size * config.workload.sequences),
        MOST_BATCH,
    )


def longest_context(e: Estimate) -> Limit:
    """The longest sequence that fits the estimate's GPU, to the token."""
    return _limit(
        e,
        "context",
        lambda config, size: config.replace(sequence_length=size),
        e.spec.longest_sequence or MOST_CONTEXT,
    )


def same_but(e: Estimate, config: TrainConfig) -> Estimate:
    """The same model on the same machine under another configuration."""
    return estimate(
        e.spec, config, hardware=e.cluster or e.hardware, efficiency=e.speed, allocator=e.settings
    )


def _limit(
    e: Estimate, what: str, sized: Callable[[TrainConfig, int], TrainConfig], most: int
) -> Limit:
    if e.hardware is None:
        raise InputError(
            f"the largest {shown(what)} that fits is a question about a GPU; add --gpu NAME"
        )
    seen: dict[int, Estimate] = {}

    def at(size: int) -> Estimate:
        if size not in seen:
            seen[size] = same_but(e, sized(e.config, size))
        return seen[size]

    sure, last = _guesses(e, what, at)
    fits = last_that(lambda size: at(size).verdict is Verdict.FITS, most, guess=sure)
    may_fit = last_that(
        lambda size: at(size).verdict is not Verdict.DOES_NOT_FIT, most, low=fits, guess=last
    )
    return Limit(
        what=what,
        fits=fits,
        may_fit=may_fit,
        at=at(fits) if fits else None,
        beyond=at(fits + 1) if fits < most else None,
    )


def _guesses(e: Estimate, what: str, at: Callable[[int], Estimate]) -> tuple[int, int]:
    """Where both limits should be, 0 where that is no quick question: a wrong guess costs time,
    never the answer.

    From requested bytes alone, then along the chord of what an empty cache would leave reserved,
    which grows nearly straight.
    """
    from napkinmath.planning.largest import Largest, is_asked

    if not is_asked(e) or e.hardware is None:
        return 0, 0
    largest = Largest(e)
    start = max(1, largest.batch() if what == "batch" else largest.context())
    low_usable, high_usable = e.hardware.usable_range
    allocated = at(start).memory.allocated
    ratios = allocated.value / allocated.high, allocated.value / allocated.low
    sure = _on_chord(lambda size: at(size).replay.peak_unreturnable, low_usable * ratios[0], start)
    return sure, _on_chord(
        lambda size: at(size).replay.peak_unreturnable, high_usable * ratios[1], max(start, sure)
    )


def _on_chord(held: Callable[[int], int], limit: float, start: int) -> int:
    """The size at which `held` reaches the limit, by a few secants."""
    before, size = max(1, start - start // 16), start
    for _ in range(MOST_SECANTS):
        rise = held(size) - held(before)
        if size == before or rise <= 0:
            break
        before, size = (
            size,
            max(1, min(2 * size, int(size + (limit - held(size)) * (size - before) / rise))),
        )
    return size


def last_that(holds: Callable[[int], bool], most: int, *, low: int = 0, guess: int = 0) -> int:
    """The largest whole number up to `most` for which a predicate that turns false once still
    holds.

    `low` is known to hold; from `guess` the search steps outwards until the answer is bracketed,
    then halves.
    """
    guess = min(max(guess, low + 1), most)
    high, step = most + 1, 1
    if guess > low + 1 and not holds(guess):
        high = guess
        while high - step > low:
            if holds(high - step):
                low = high - step
                break
            high, step = high - step, step * 4
    else:
        low, step = (guess, step) if guess > low + 1 else (low, 1)
        while low + step <= most:
            if not holds(low + step):
                high = low + step
                break
            low, step = low + step, step * 4
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
