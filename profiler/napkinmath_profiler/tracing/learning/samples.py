"""Samples of one model that separate sizes: its config, batch and length at several values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from napkinmath.models.tasks import PICTURED

from napkinmath_profiler.tracing.learning.config_fields import FoundFields, Trial, same_form
from napkinmath_profiler.tracing.learning.symbols import evaluated
from napkinmath_profiler.tracing.trace_errors import TraceError

BASE, ONE = (2, 320), (1, 320)
LONGER = 448
SINGLE_OTHERS = ((1, LONGER), (1, 333))
# (batch, length) beside the base; an odd length shows what is padded.
OTHERS = ((3, 320), (2, LONGER), (2, 333))
TARGET, TARGETS = 192, (272, 205)
"""Length of what a decoder makes, and others."""
PLACES = ("b", "s", "st")


FAR = (40, 1400)
"""Lengths far from those of the samples."""


def refuse_loops(base: Any, at: Callable[[int], Any], longest: int) -> None:
    """Raises TraceError where a class runs other operations at another length, as one that goes
    over the sequence block by block. `at` gives the outline of a length; `longest` is the last that
    its positions go to, 0 where nothing limits them."""
    for length in (min(n, longest or n) for n in FAR):
        try:
            made = at(length)
        except Exception:  # whatever a class raises of a length that it does not take
            continue
        if not same_form(made, base):
            raise TraceError(f"it runs other operations at {length} tokens than at {BASE[1]}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """One sample: a config, a batch and a length, and what they bind."""

    config: Mapping[str, Any]
    place: tuple[int, ...]
    """Batch and length; of what a decoder makes, its length too."""
    symbols: Mapping[str, int]

    @property
    def bound(self) -> dict[str, int]:
        """Every symbol's value."""
        return {**dict(zip(PLACES, self.place, strict=False)), **self.symbols}


def telling_apart(
    few: Sequence[Sizes], more: Sequence[Sizes], expressions: Collection[str | int]
) -> list[Sizes]:
    """A few samples, and as many more as it takes until no two of the sizes are the same numbers."""
    chosen = list(few)
    numbers = {e: tuple(evaluated(e, one.bound) for one in chosen) for e in expressions}
    while len(set(numbers.values())) < len(numbers):
        found = [{e: (*numbers[e], evaluated(e, one.bound)) for e in numbers} for one in more]
        best = max(range(len(more)), key=lambda i: len(set(found[i].values())))
        if len(set(found[best].values())) == len(set(numbers.values())):
            break
        chosen.append(more[best])
        numbers = found[best]
    return chosen


def with_targets(places: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Batch, length and the length of what a decoder makes; the last moves alone too."""
    return [*((*place, TARGET) for place in places), *((*places[0], n) for n in TARGETS)]


class SampleSizes:
    """The samples of a config. `alone` moves one symbol at a time and then all of them; `few` moves
    all at once, which distinguishes known sizes."""

    def __init__(
        self,
        short: Mapping[str, Any],
        found: FoundFields,
        trial: Trial,
        task: str,
        *,
        targets: bool = False,
    ) -> None:
        self.short, self.found = short, found
        joint = self._joint(trial)
        one = [{name: moves.second} for name, moves in found.symbols.items()]
        if task in PICTURED:  # whose size is the config's
            self.alone, self.few = self._both(((2, 1), (3, 1)), one, joint)
            self.single_alone, self.single_few = self._both(((1, 1), (1, 1)), one, joint)
            return
        several, single = (BASE, *OTHERS), (ONE, *SINGLE_OTHERS)
        if targets:
            several, single = with_targets(several), with_targets(single)
        self.alone, self.few = self._both(several, one, joint)
        self.single_alone, self.single_few = self._both(single, one, joint)

    def _both(
        self,
        places: Sequence[tuple[int, ...]],
        one: Sequence[Mapping[str, int]],
        joint: Mapping[str, int],
    ) -> tuple[list[Sizes], list[Sizes]]:
        base = places[0]
        most, longest = max(one[0] for one in places), max(base[1], LONGER * (base[1] > 1))
        last = self._one((most, longest, *TARGETS[: len(base) - 2]), joint)
        plain = [self._one(place, {}) for place in places]
        return (
            [*plain, *(self._one(base, moved) for moved in one), last],
            [plain[-1], last],
        )

    def _joint(self, trial: Trial) -> dict[str, int]:
        """As many symbols at once as the class takes, at values that no other sample has."""
        symbols, base = self.found.symbols, trial(self.short)
        every = {name: max(moves.second, moves.third) for name, moves in symbols.items()}
        if self._fits(every, base, trial):
            return every
        chosen: dict[str, int] = {}
        for name, value in every.items():
            if self._fits({**chosen, name: value}, base, trial):
                chosen[name] = value
        return chosen

    def _fits(self, values: Mapping[str, int], base: Any, trial: Trial) -> bool:
        try:
            made = trial({**self.short, **self.found.changes(self.short, values)})
        except Exception:  # whatever a class raises of values that do not go together
            return False
        return same_form(made, base)

    def _one(self, place: tuple[int, ...], values: Mapping[str, int]) -> Sizes:
        config = {**self.short, **self.found.changes(self.short, values)}
        return Sizes(config, place, self.found.bound(values))


def chunks_of(config: Mapping[str, Any]) -> list[int]:
    """Whole numbers of a config that a length may be padded to."""
    return [v for v in config.values() if type(v) is int and 1 < v <= BASE[1]]
