"""The allocator without settings on one stream: `malloc` and `free` of many events, written out.

Most of an answer's time is spent here. Tests hold it to the allocator's own two functions, block by
block. A pool of many free blocks is played in drawers: a sorted list moves all that lies behind what
is put in or taken out. The pools are apart but for what the device lends: where a layer leaves the
small pool as it found it, its later repetitions play the large pool alone (memory/small_pool.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import length_hint

from napkinmath.base.cuda import ALLOCATION_GRANULE, LARGE_ROUNDING, SMALL_LIMIT
from napkinmath.memory.allocator import ADDRESS_BITS, AllocatorBlock
from napkinmath.memory.allocator_settings import BOOKED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.memory.allocator import CachingAllocator
    from napkinmath.memory.small_pool import Cut, Large, Ready, SmallPart


DRAWER = 512  # free blocks of a drawer when it is made
FEW = 4 * DRAWER  # free blocks of a pool that are moved as quickly as a drawer is found
LONG = 100_000  # events of all repetitions above which the small pool is looked at
SETTLES = 6  # repetitions in which it may come to leave the small pool as it found it


class _Drawers:
    """A pool's free blocks in order, those of each drawer below its bound; the pool's own lists
    where there are no bounds."""

    __slots__ = ("_pool", "blocks", "bounds", "keys")

    def __init__(self, keys: list[int], blocks: list[AllocatorBlock]) -> None:
        self._pool = keys, blocks
        self.bounds: list[int] = []
        self.keys, self.blocks = [keys], [blocks]
        self.open()

    def open(self) -> None:
        """Divides the pool's lists, where they are long."""
        keys, blocks = self._pool
        if len(keys) > FEW:
            starts = range(0, len(keys), DRAWER)
            self.bounds[:] = [keys[start] for start in starts[1:]]
            self.keys[:] = [keys[start : start + DRAWER] for start in starts]
            self.blocks[:] = [blocks[start : start + DRAWER] for start in starts]

    def close(self) -> None:
        """Puts all blocks back into the pool's lists."""
        if self.bounds:
            keys, blocks = self._pool
            keys[:] = [key for drawer in self.keys for key in drawer]
            blocks[:] = [block for drawer in self.blocks for block in drawer]
            self.bounds.clear()
            self.keys[:], self.blocks[:] = [keys], [blocks]


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
                ready.append((size, size << ADDRESS_BITS, held[index], index))
            elif action == "-":
                ready.append((0, 0, held[index], index))
            else:
                old, new = pairs[index]
                ready.append((0, 1, held[old], new))
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
            states.append((tuple(allocator.keys[1]), part.addresses()))
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
                self._in_drawers(large.events)
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
        allocator = self._allocator
        while times:
            # once more for each time that the free blocks outnumber the events: drawers are costly
            free = len(allocator.keys[0]) + len(allocator.keys[1])
            turns = min(times, 1 + free // (len(ready) or 1))
            self._in_drawers(ready * turns)
            times -= turns

    def _in_drawers(self, ready: list[Ready]) -> None:
        allocator = self._allocator
        pools = [
            _Drawers(keys, blocks)
            for keys, blocks in zip(allocator.keys[:2], allocator.blocks[:2], strict=True)
        ]
        try:
            self._play(ready, *pools)
        finally:
            for pool in pools:
                pool.close()

    def _new_block(
        self, size: int, pool: int, index: int, drawers: tuple[_Drawers, ...]
    ) -> AllocatorBlock:
        """A block of a new segment. A device that is full empties its cache, which is then in the
        pools' own lists."""
        allocator = self._allocator
        settings = allocator.settings
        most = size + max(settings.large_segment_bytes, LARGE_ROUNDING)  # of the segment
        may_empty = allocator.reserved + most > settings.limit_bytes
        if may_empty:
            if self._alone:
                raise _FullError
            for pool_drawers in drawers:
                pool_drawers.close()
        block = allocator.new_block(size, pool, self._sizes[index])
        if may_empty:
            for pool_drawers in drawers:
                pool_drawers.open()
        return block

    def _play(self, ready: list[Ready], large: _Drawers, small: _Drawers) -> None:
        allocator, held, spare = self._allocator, self._held, self._spare
        large_bounds, large_keys, large_blocks = large.bounds, large.keys, large.blocks
        small_bounds, small_keys, small_blocks = small.bounds, small.keys, small.blocks
        allocated, peak = allocator.allocated, allocator.peak_allocated
        bits, limit, search, drawer = ADDRESS_BITS, SMALL_LIMIT, bisect_left, bisect_right
        events, cuts = iter(ready), self._cuts
        try:
            for size, least_key, stack, index in events:
                if size:
                    if size > limit:
                        bounds, all_keys, all_blocks = large_bounds, large_keys, large_blocks
                        least = limit
                    elif size > 0:
                        bounds, all_keys, all_blocks = small_bounds, small_keys, small_blocks
                        least = 0
                    else:
                        if size == BOOKED:
                            if allocated + index > peak:
                                peak = allocated + index
                            allocated += least_key
                        else:  # CUT
                            unreturnable = allocator.reserved - allocator.whole + index
                            if unreturnable > allocator.peak_unreturnable:
                                allocator.peak_unreturnable = unreturnable
                            allocator.whole -= least_key
                        continue
                    where = drawer(bounds, least_key)
                    keys, blocks = all_keys[where], all_blocks[where]
                    at = search(keys, least_key)
                    while at == len(keys) and where < len(bounds):
                        where += 1
                        keys, blocks, at = all_keys[where], all_blocks[where], 0
                    if at < len(keys):
                        block = blocks.pop(at)
                        del keys[at]
                        found = block.size
                        if found == block.segment.size:
                            allocator.whole -= found
                            allocator.note_unreturnable()
                            if cuts is not None and not least:
                                cuts.append((length_hint(events), found))
                    else:
                        allocator.allocated = allocated  # as the message has it
                        block = self._new_block(size, int(not least), index, (large, small))
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
                        rest.key = key = remaining << bits | address
                        where = drawer(bounds, key)
                        keys, blocks = all_keys[where], all_blocks[where]
                        at = search(keys, key)
                        keys.insert(at, key)
                        blocks.insert(at, rest)
                        found = size
                    block.free = False
                    allocated += found
                    if allocated > peak:
                        peak = allocated
                    stack.append(block)
                elif least_key:
                    held[index].append(stack.pop())
                else:
                    block = stack.pop()
                    size = block.size
                    allocated -= size
                    if block.pool:
                        bounds, all_keys, all_blocks = small_bounds, small_keys, small_blocks
                    else:
                        bounds, all_keys, all_blocks = large_bounds, large_keys, large_blocks
                    before, after = block.before, block.after
                    if after is not None and after.free:
                        where = drawer(bounds, after.key)
                        keys = all_keys[where]
                        at = search(keys, after.key)
                        del keys[at], all_blocks[where][at]
                        size += after.size
                        spare.append(after)
                        after = block.after = after.after
                        if after is None:
                            block.segment.last = block
                        else:
                            after.before = block
                    if before is not None and before.free:
                        where = drawer(bounds, before.key)
                        keys = all_keys[where]
                        at = search(keys, before.key)
                        del keys[at], all_blocks[where][at]
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
                    block.key = key = size << bits | block.address
                    where = drawer(bounds, key)
                    keys = all_keys[where]
                    at = search(keys, key)
                    keys.insert(at, key)
                    all_blocks[where].insert(at, block)
        finally:
            allocator.allocated, allocator.peak_allocated = allocated, peak
            self._unplayed = length_hint(events)
