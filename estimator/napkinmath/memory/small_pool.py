"""A layer's events of the small pool apart from those of the large one.

A pool's layout follows from its own events alone. What is booked of the small pool is the bytes that
are asked for, since its blocks are always split. So where a layer leaves the small pool as it found
it, all that its repetitions change is known without playing them. Between the events of the large
pool these are the bytes booked, and those of segments that are cut into or whole again.
"""

from __future__ import annotations

from napkinmath.base.cuda import ALLOCATION_GRANULE, SMALL_LIMIT
from napkinmath.memory.allocator_settings import BOOKED, CUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.memory.blocks import AllocatorBlock

    Ready = tuple[int, int, list[AllocatorBlock], int]
    """Bytes to book (0 to free), 0, the blocks of the tensor, and its number; RENAMED: the number
    of the tensor that it becomes. BOOKED or CUT: the bytes by which events of the small pool change
    what is booked, or cut into, and the most that they add meanwhile."""

    Cut = tuple[int, int]
    """Events that follow it, and the bytes of the segment that is cut into; negative: whole again."""


class Large:
    """The events of the large pool over a period of some repetitions, with what those of the small
    one change between them; `places` are the repetition and the position of each."""

    __slots__ = ("events", "period", "places")

    def __init__(self, period: int) -> None:
        self.period = period
        self.events: list[Ready] = []
        self.places: list[tuple[int, int]] = []

    def add(self, event: Ready, turn: int, at: int) -> None:
        """One event more, and its place."""
        self.events.append(event)
        self.places.append((turn, at))


class SmallPart:
    """What a layer's events do to the small pool."""

    __slots__ = ("_booked", "_ready", "_stacks", "leaves_as_many", "small")

    def __init__(
        self,
        events: list[tuple[str, int]],
        pairs: list[tuple[int, int]],
        ready: list[Ready],
        sizes: list[int],
    ) -> None:
        self._ready = ready
        self.small: list[bool] = []
        """Of each event whether it is of the small pool."""
        self._booked: list[int] = []
        self._stacks: dict[int, list[AllocatorBlock]] = {}
        counts: dict[int, int] = {}
        keeps_pools = True
        for (action, index), one in zip(events, ready, strict=True):
            old, new = (index, index) if action in "+-" else pairs[index]
            is_small = sizes[old] <= SMALL_LIMIT
            keeps_pools = keeps_pools and sizes[old] == sizes[new]
            booked = -(-sizes[old] // ALLOCATION_GRANULE) * ALLOCATION_GRANULE
            if is_small and action != "+":
                self._stacks[old] = one[2]
                counts[old] = counts.get(old, 0) - 1
            if is_small and action != "-":
                counts[new] = counts.get(new, 0) + 1
            self.small.append(is_small)
            self._booked.append(booked * ((action == "+") - (action == "-")))
        self.leaves_as_many = keeps_pools and not any(counts.values())
        """Whether every tensor of the small pool has as many blocks after as before."""

    def addresses(self) -> object:
        """Where the blocks are that the events may free: with the pool's free blocks, its layout."""
        return [[block.address for block in stack] for stack in self._stacks.values()]

    def large(self, logs: list[list[Cut]]) -> Large:
        """The large pool's events over a period, in whose repetitions the small pool's segments are
        cut as the logs have it."""
        found, last = Large(len(logs)), len(self._ready) - 1
        for turn, log in enumerate(logs):
            cuts = [0] * len(self._ready)
            for left, nbytes in log:
                cuts[last - left] += nbytes
            net = high = cut = most_cut = 0
            for at, one in enumerate(self._ready):
                if self.small[at]:
                    net += self._booked[at]
                    cut += cuts[at]
                    high, most_cut = max(high, net), max(most_cut, cut)
                if not self.small[at] or at == last:
                    if net or high:
                        found.add((BOOKED, net, [], high), turn, at)
                    if cut or most_cut:
                        found.add((CUT, cut, [], most_cut), turn, at)
                    if not self.small[at]:
                        found.add(one, turn, at)
                    net = high = cut = most_cut = 0
        return found
