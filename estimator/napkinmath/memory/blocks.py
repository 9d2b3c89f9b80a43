"""Blocks of the caching allocator: booked, free, and waiting for another stream.

Best fit takes the smallest size that is enough, and of it the lowest address. Pools of 100,000 free
blocks have some dozens of sizes, so a list for each size is soon found. Its lowest address comes
last, where it is soon taken.

`record_stream` makes the allocator note an event of that stream when the tensor goes, and use the
block again only after it. Allocated bytes fall at once, reserved ones cannot serve meanwhile. When
the event has passed is a matter of time; what bounds it is the engine: FSDP 1 lets the host run two
gathers ahead. So blocks wait in groups, one a unit, until so many later groups have gone. Sources:
torch c10/cuda/CUDACachingAllocator.cpp free, insert_events, process_events,
synchronize_and_free_events; distributed/fsdp/_limiter_utils.py _FreeEventQueue.
"""

from __future__ import annotations

from bisect import bisect_left

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napkinmath.ir.ledger import StreamUse

    Bin = tuple[list[int], list["AllocatorBlock"]]
    """Keys of free blocks of one size, ascending, and the blocks."""


class AllocatorBlock:
    """A range of a segment: free or booked, with its neighbours."""

    __slots__ = ("address", "after", "before", "free", "key", "pool", "segment", "size")

    def __init__(self, address: int, size: int, pool: int, segment: AllocatorSegment) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.key = -address  # the lowest address has the highest key
        self.before: AllocatorBlock | None = None
        self.after: AllocatorBlock | None = None
        self.free = True


class AllocatorSegment:
    """Memory got from the device in one piece (or, expandable, growing at its end)."""

    __slots__ = ("address", "last", "last_used", "pool", "size")

    def __init__(self, address: int, size: int, pool: int) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.last_used = 0
        self.last: AllocatorBlock | None = None

    @property
    def small(self) -> bool:
        """Whether it is of its stream's small pool."""
        return bool(self.pool & 1)


class FreeBlocks:
    """A pool's free blocks. `bins` has them by size, `sizes` its keys in order; a bin may be empty
    until a search comes across it."""

    __slots__ = ("bins", "sizes")

    def __init__(self) -> None:
        self.bins: dict[int, Bin] = {}
        self.sizes: list[int] = []

    def put(self, block: AllocatorBlock) -> None:
        """Adds a block."""
        found = self.bins.get(block.size)
        if found is None:
            self.bins[block.size] = [block.key], [block]
            self.sizes.insert(bisect_left(self.sizes, block.size), block.size)
            return
        keys, blocks = found
        index = bisect_left(keys, block.key)
        keys.insert(index, block.key)
        blocks.insert(index, block)

    def remove(self, block: AllocatorBlock) -> None:
        """Takes out a block that is in it."""
        keys, blocks = self.bins[block.size]
        index = bisect_left(keys, block.key)
        del keys[index], blocks[index]

    def best(self, size: int) -> AllocatorBlock | None:
        """The smallest block of at least so many bytes, at the lowest address; it stays in."""
        bins, sizes = self.bins, self.sizes
        index = bisect_left(sizes, size)
        while index < len(sizes):
            blocks = bins[sizes[index]][1]
            if blocks:
                return blocks[-1]
            del bins[sizes[index]], sizes[index]
        return None

    def layout(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Size and keys of every block that is free."""
        bins = self.bins
        return tuple((size, tuple(bins[size][0])) for size in self.sizes if bins[size][0])

    def __iter__(self) -> Iterator[AllocatorBlock]:
        for size in self.sizes:
            yield from reversed(self.bins[size][1])


class WaitingBlocks:
    """Queues of groups of blocks, by what they wait for; `put_back` makes one free."""

    __slots__ = ("_put_back", "_queues")

    def __init__(self, put_back: Callable[[AllocatorBlock], None]) -> None:
        self._put_back = put_back
        self._queues: dict[str, list[list[AllocatorBlock]]] = {}

    def add(self, block: AllocatorBlock, use: StreamUse) -> None:
        """A block joins its queue's open group; where that closes, the groups before the last `lag`
        are free."""
        groups = self._queues.setdefault(use.queue, [[]])
        groups[-1].append(block)
        if use.closes:
            while len(groups) > use.lag:
                self._free(groups.pop(0))
            groups.append([])

    def done(self) -> None:
        """All work is over (the host has read a result of it): everything that waits is free."""
        for groups in self._queues.values():
            for group in groups:
                self._free(group)
        self._queues.clear()

    def addresses(self) -> list[list[list[int]]]:
        """What waits, in order."""
        return [
            [[block.address for block in group] for group in groups]
            for _, groups in sorted(self._queues.items())
        ]

    def _free(self, group: list[AllocatorBlock]) -> None:
        for block in group:
            self._put_back(block)
