"""The allocator without settings on one stream: `malloc` and `free` of many events, written out.

Most of an answer's time is spent here. Tests hold it to the allocator's own two functions, block by
block. A pool of many free blocks is played in drawers: a sorted list moves all that lies behind what
is put in or taken out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from napkinmath.base.cuda import ALLOCATION_GRANULE, LARGE_ROUNDING, SMALL_LIMIT
from napkinmath.memory.allocator import ADDRESS_BITS, AllocatorBlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.memory.allocator import CachingAllocator

    _Ready = tuple[int, int, list[AllocatorBlock], int]
    """Bytes to book and the least key that has them, or 0 to free (1 to rename), the blocks of the
    tensor, and its number (of the tensor that it becomes)."""


DRAWER = 512  # free blocks of a drawer when it is made
FEW = 4 * DRAWER  # free blocks of a pool that are moved as quickly as a drawer is found


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


class PlainBooks:
    """Books tensors of these bytes with a plain allocator; `held` are the blocks of each."""

    __slots__ = ("_allocator", "_held", "_ready", "_sizes", "_spare")

    def __init__(
        self, allocator: CachingAllocator, sizes: list[int], held: list[list[AllocatorBlock]]
    ) -> None:
        self._allocator, self._sizes, self._held = allocator, sizes, held
        self._spare: list[AllocatorBlock] = []  # merged into others, to serve as new ones
        self._ready: dict[int, list[_Ready]] = {}

    def _made_ready(self, events: list[tuple[str, int]], pairs: list[tuple[int, int]]) -> None:
        """What each event asks for, found out once for all times that it is played."""
        held, sizes = self._held, self._sizes
        ready: list[_Ready] = []
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
        if id(events) not in self._ready:
            self._made_ready(events, pairs)
        ready, allocator = self._ready[id(events)], self._allocator
        allocator.add_pools(2)
        while times:
            # once more for each time that the free blocks outnumber the events: drawers are costly
            free = len(allocator.keys[0]) + len(allocator.keys[1])
            turns = min(times, 1 + free // (len(ready) or 1))
            pools = [
                _Drawers(keys, blocks)
                for keys, blocks in zip(allocator.keys[:2], allocator.blocks[:2], strict=True)
            ]
            try:
                self._play(ready * turns, *pools)
            finally:
                for pool in pools:
                    pool.close()
            times -= turns

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
            for pool_drawers in drawers:
                pool_drawers.close()
        block = allocator.new_block(size, pool, self._sizes[index])
        if may_empty:
            for pool_drawers in drawers:
                pool_drawers.open()
        return block

    def _play(self, ready: list[_Ready], large: _Drawers, small: _Drawers) -> None:
        allocator, held, spare = self._allocator, self._held, self._spare
        large_bounds, large_keys, large_blocks = large.bounds, large.keys, large.blocks
        small_bounds, small_keys, small_blocks = small.bounds, small.keys, small.blocks
        allocated, peak = allocator.allocated, allocator.peak_allocated
        bits, limit, search, drawer = ADDRESS_BITS, SMALL_LIMIT, bisect_left, bisect_right
        try:
            for size, least_key, stack, index in ready:
                if size:
                    if size > limit:
                        bounds, all_keys, all_blocks = large_bounds, large_keys, large_blocks
                        least = limit
                    else:
                        bounds, all_keys, all_blocks = small_bounds, small_keys, small_blocks
                        least = 0
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
                    block.key = key = size << bits | block.address
                    where = drawer(bounds, key)
                    keys = all_keys[where]
                    at = search(keys, key)
                    keys.insert(at, key)
                    all_blocks[where].insert(at, block)
        finally:
            allocator.allocated, allocator.peak_allocated = allocated, peak
