"""The allocator without settings on one stream: `malloc` and `free` of many events, written out.

Most of an answer's time is spent here. Tests hold it to the allocator's own two functions, block by
block. The pools are apart but for what the device lends: where a layer leaves the small pool as it
found it, its later repetitions play the large pool alone (memory/small_pool.py).
"""

from __future__ import annotations

from bisect import bisect_left
from operator import length_hint

from napkinmath.base.cuda import ALLOCATION_GRANULE, LARGE_ROUNDING, SMALL_LIMIT
from napkinmath.memory.allocator_settings import BOOKED, RENAMED
from napkinmath.memory.blocks import AllocatorBlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.memory.allocator import CachingAllocator
    from napkinmath.memory.small_pool import Cut, Large, Ready, SmallPart


LONG = 100_000  # events of all repetitions above which the small pool is looked at
SETTLES = 6  # repetitions in which it may come to leave the small pool as it found it


class _FullError(Exception):
    """The device may be full while the large pool is played alone."""


class PlainBooks:
    """Books tensors of these bytes with a plain allocator; `held` are the blocks of each."""

    __slots__ = (
        "_allocator",
        "_alone",
        "_cuts",
        "_held",
        "_ready",
        "_sizes",
        "_small",
        "_spare",
        "_unplayed",
    )

    def __init__(
        self, allocator: CachingAllocator, sizes: list[int], held: list[list[AllocatorBlock]]
    ) -> None:
        self._allocator, self._sizes, self._held = allocator, sizes, held
        self._spare: list[AllocatorBlock] = []  # merged into others, to serve as new ones
        self._ready: dict[int, list[Ready]] = {}
        self._small: dict[int, SmallPart] = {}
        self._cuts: list[Cut] | None = None  # where asked for
        self._alone = False  # whether the large pool is played alone
        self._unplayed = 0  # events that were left at a failure

    def _made_ready(self, events: list[tuple[str, int]], pairs: list[tuple[int, int]]) -> None:
        """What each event asks for, found out once for all times that it is played."""
        held, sizes = self._held, self._sizes
        ready: list[Ready] = []
        for action, index in events:
            if action == "+":
                size = (sizes[index] + ALLOCATION_GRANULE - 1) & -ALLOCATION_GRANULE
                ready.append((size, 0, held[index], index))
            elif action == "-":
                ready.append((0, 0, held[index], index))
            else:
                old, new = pairs[index]
                ready.append((RENAMED, 0, held[old], new))
        self._ready[id(events)] = ready

    def play(self, events: list[tuple[str, int]], pairs: list[tuple[int, int]], times: int) -> None:
        """Books the events in order, so many times. Raises OutOfMemory."""
        key = id(events)
        if key not in self._ready:
            self._made_ready(events, pairs)
        ready = self._ready[key]
        self._allocator.add_pools(2)
        if len(ready) * times > LONG:
            from napkinmath.memory.small_pool import SmallPart

            if key not in self._small:
                self._small[key] = SmallPart(events, pairs, ready, self._sizes)
            times = self._left_when_settled(ready, self._small[key], times)
        self._repeat(ready, times)

    def _left_when_settled(self, ready: list[Ready], part: SmallPart, times: int) -> int:
        """Plays events until they leave the small pool as it was after one of the two times before,
        and then the large pool alone; gives how often all are still to be played."""
        allocator, states = self._allocator, list[object]()
        logs: list[list[Cut]] = []
        if not part.leaves_as_many:
            return times
        for played in range(1, min(times, SETTLES) + 1):
            retries, self._cuts = allocator.num_retries, []
            self._repeat(ready, 1)
            logs.append(self._cuts)
            self._cuts = None
            if allocator.num_retries != retries:  # it returned what the next would have found
                return times - played
            states.append((allocator.pools[1].layout(), part.addresses()))
            for period in (1, 2):
                if played > period and states[-1] == states[-1 - period]:
                    large = part.large(logs[-period:])
                    return times - played - self._repeat_large(ready, part, large, times - played)
        return times - len(states)

    def _repeat_large(self, ready: list[Ready], part: SmallPart, large: Large, times: int) -> int:
        """Books the large pool's events of some periods; gives the times that are through.

        A device that is full also returns segments of the small pool, which is then played up to
        where the large one is.
        """
        allocator, period = self._allocator, large.period
        self._alone = True
        for begun in range(0, times // period * period, period):
            try:
                self._play(large.events)
            except _FullError:
                self._alone = False
                turn, at = large.places[-1 - self._unplayed]
                before = [one for one, small in zip(ready, part.small, strict=True) if small]
                upto = [
                    one for one, small in zip(ready[:at], part.small[:at], strict=True) if small
                ]
                figures = allocator.allocated, allocator.peak_allocated
                whole, peak = allocator.whole, allocator.peak_unreturnable
                self._repeat(before * turn + upto, 1)
                allocator.allocated, allocator.peak_allocated = figures
                allocator.whole, allocator.peak_unreturnable = whole, peak
                self._repeat(ready[at:], 1)
                return begun + turn + 1
        self._alone = False
        return times // period * period

    def _repeat(self, ready: list[Ready], times: int) -> None:
        for _ in range(times):
            self._play(ready)

    def _new_block(self, size: int, pool: int, index: int) -> AllocatorBlock:
        """A block of a new segment. A device that is full empties its cache."""
        allocator = self._allocator
        settings = allocator.settings
        most = size + max(settings.large_segment_bytes, LARGE_ROUNDING)  # of the segment
        if self._alone and allocator.reserved + most > settings.limit_bytes:
            raise _FullError
        return allocator.new_block(size, pool, self._sizes[index])

    def _play(self, ready: list[Ready]) -> None:
        allocator, held, spare = self._allocator, self._held, self._spare
        pools = [(pool.bins, pool.sizes) for pool in allocator.pools[:2]]
        (large_bins, large_sizes), (small_bins, small_sizes) = pools
        allocated, peak = allocator.allocated, allocator.peak_allocated
        limit, search = SMALL_LIMIT, bisect_left
        events, cuts = iter(ready), self._cuts
        allocator.num_events += len(ready)
        try:
            for size, amount, stack, index in events:
                if size > 0:
                    if size > limit:
                        bins, sizes, least = large_bins, large_sizes, limit
                    else:
                        bins, sizes, least = small_bins, small_sizes, 0
                    found = size
                    bin = bins.get(size)
                    if bin is None or not bin[0]:
                        at = search(sizes, size)
                        while at < len(sizes):
                            found = sizes[at]
                            bin = bins[found]
                            if bin[0]:
                                break
                            del sizes[at], bins[found]
                        else:
                            bin = None
                    if bin is not None:
                        del bin[0][-1]
                        block = bin[1].pop()
                        if found == block.segment.size:
                            allocator.whole -= found
                            allocator.note_unreturnable()
                            if cuts is not None and not least:
                                cuts.append((length_hint(events), found))
                    else:
                        allocator.allocated = allocated  # as the message has it
                        block = self._new_block(size, int(not least), index)
                        found = block.size
                        allocator.note_unreturnable()
                    remaining = found - size
                    if remaining > least:
                        after, address = block.after, block.address + size
                        if spare:
                            rest = spare.pop()
                            rest.address, rest.size, rest.free = address, remaining, True
                            rest.pool, rest.segment = block.pool, block.segment
                        else:
                            rest = AllocatorBlock(address, remaining, block.pool, block.segment)
                        rest.before, rest.after = block, after
                        if after is None:
                            block.segment.last = rest
                        else:
                            after.before = rest
                        block.after, block.size = rest, size
                        rest.key = key = -address
                        bin = bins.get(remaining)
                        if bin is None:
                            bins[remaining] = [key], [rest]
                            sizes.insert(search(sizes, remaining), remaining)
                        else:
                            keys, blocks = bin
                            at = search(keys, key)
                            keys.insert(at, key)
                            blocks.insert(at, rest)
                        found = size
                    block.free = False
                    allocated += found
                    if allocated > peak:
                        peak = allocated
                    stack.append(block)
                elif not size:
                    block = stack.pop()
                    size = block.size
                    allocated -= size
                    bins, sizes = pools[block.pool]
                    before, after = block.before, block.after
                    if after is not None and after.free:
                        keys, blocks = bins[after.size]
                        at = search(keys, after.key)
                        del keys[at], blocks[at]
                        size += after.size
                        spare.append(after)
                        after = block.after = after.after
                        if after is None:
                            block.segment.last = block
                        else:
                            after.before = block
                    if before is not None and before.free:
                        keys, blocks = bins[before.size]
                        at = search(keys, before.key)
                        del keys[at], blocks[at]
                        size += before.size
                        spare.append(block)
                        before.after = after
                        if after is None:
                            block.segment.last = before
                        else:
                            after.before = before
                        block = before
                    block.free, block.size = True, size
                    if size == block.segment.size:
                        allocator.whole += size
                        if cuts is not None and block.pool:
                            cuts.append((length_hint(events), -size))
                    key = block.key
                    bin = bins.get(size)
                    if bin is None:
                        bins[size] = [key], [block]
                        sizes.insert(search(sizes, size), size)
                    else:
                        keys, blocks = bin
                        at = search(keys, key)
                        keys.insert(at, key)
                        blocks.insert(at, block)
                elif size == RENAMED:
                    held[index].append(stack.pop())
                elif size == BOOKED:
                    if allocated + index > peak:
                        peak = allocated + index
                    allocated += amount
                else:  # CUT
                    unreturnable = allocator.reserved - allocator.whole + index
                    if unreturnable > allocator.peak_unreturnable:
                        allocator.peak_unreturnable = unreturnable
                    allocator.whole -= amount
        finally:
            allocator.allocated, allocator.peak_allocated = allocated, peak
            self._unplayed = length_hint(events)
