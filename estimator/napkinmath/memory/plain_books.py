"""The allocator without settings on one stream: `malloc` and `free` of many events, written out.

Most of an answer's time is spent here. Tests hold it to the allocator's own two functions, block by
block.
"""

from __future__ import annotations

from bisect import bisect_left

from napkinmath.base.cuda import ALLOCATION_GRANULE, SMALL_LIMIT
from napkinmath.memory.allocator import ADDRESS_BITS, AllocatorBlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.memory.allocator import CachingAllocator

    _Ready = tuple[int, int, list[AllocatorBlock], int]
    """Bytes to book and the least key that has them, or 0 to free (1 to rename), the blocks of the
    tensor, and its number (of the tensor that it becomes)."""


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
        allocator, held, spare = self._allocator, self._held, self._spare
        allocator.add_pools(2)
        large_keys, small_keys = allocator.keys[:2]
        large_blocks, small_blocks = allocator.blocks[:2]
        allocated, peak = allocator.allocated, allocator.peak_allocated
        bits, limit, search = ADDRESS_BITS, SMALL_LIMIT, bisect_left
        try:
            for size, least_key, stack, index in self._ready[id(events)] * times:
                if size:
                    if size > limit:
                        keys, blocks, least = large_keys, large_blocks, limit
                    else:
                        keys, blocks, least = small_keys, small_blocks, 0
                    at = search(keys, least_key)
                    if at < len(keys):
                        block = blocks.pop(at)
                        del keys[at]
                        found = block.size
                        if found == block.segment.size:
                            allocator.whole -= found
                            allocator.note_unreturnable()
                    else:
                        allocator.allocated = allocated  # as the message has it
                        block = allocator.new_block(size, int(not least), self._sizes[index])
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
                        keys, blocks = small_keys, small_blocks
                    else:
                        keys, blocks = large_keys, large_blocks
                    before, after = block.before, block.after
                    if after is not None and after.free:
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
                    block.key = key = size << bits | block.address
                    at = search(keys, key)
                    keys.insert(at, key)
                    blocks.insert(at, block)
        finally:
            allocator.allocated, allocator.peak_allocated = allocated, peak
