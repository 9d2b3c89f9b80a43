"""PyTorch's CUDA caching allocator: what it books (allocated) and what it holds (reserved).

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.10 to 2.13): requests round up to 512 B. Up to 1
MiB they come from 2 MiB segments of the small pool, up to 10 MiB from 20 MiB segments, above from
segments rounded to 2 MiB. Best fit by (size, address). A small block splits if 512 B remain, a
large one if more than 1 MiB remains (any, with expandable segments). Free neighbours merge. When
the device is full, cached segments are returned and the request is tried again. Blocks are booked
whole, so an unsplit remainder counts as allocated. A block serves its own stream; one that another
stream still uses waits for it (memory/blocks.py)."""

from __future__ import annotations

from napkinmath.base.cuda import (
    ALLOCATION_GRANULE,
    LARGE_LIMIT,
    LARGE_ROUNDING,
    LARGE_SEGMENT,
    SMALL_LIMIT,
    SMALL_SEGMENT,
)
from napkinmath.base.units import GIB, format_bytes
from napkinmath.memory.allocator_settings import UNLIMITED, AllocatorSettings
from napkinmath.memory.blocks import AllocatorBlock, AllocatorSegment, FreeBlocks, WaitingBlocks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import StreamUse


class ReplayOutOfMemory(Exception):
    """The replay found no memory for a request, even after returning every cached segment."""

    def __init__(self, requested: int, allocated: int, reserved: int, limit: int) -> None:
        super().__init__(
            f"tried to allocate {format_bytes(requested)}; {format_bytes(allocated)} allocated,"
            f" {format_bytes(reserved)} reserved of {limit / GIB:.2f} GiB"
        )
        self.requested, self.allocated = requested, allocated
        self.reserved, self.limit = reserved, limit

    @property
    def missing(self) -> int:
        """Bytes by which the request is above what the device could still give."""
        return max(1, self.reserved + self.requested - self.limit)


class CachingAllocator:
    """The allocator's state: `allocated`, `reserved`, their peaks, free blocks of both pools, live
    segments."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.peak_unreturnable = 0  # reserved less what empty_cache() would have returned just then
        self.whole = 0  # bytes of segments that are one free block
        self.num_retries = self.num_events = 0  # events: as a replay has played them
        self.segments: dict[int, AllocatorSegment] = {}
        self.pools: list[FreeBlocks] = []  # of each stream the large one and the small one
        self.next_address = LARGE_ROUNDING
        self._expandable: list[AllocatorSegment | None] = []
        self.waiting = WaitingBlocks(self._put_back)
        self._clock = 0
        self._rounds_by_powers = self.settings.roundup_power2_divisions > 1
        self._max_split = self.settings.max_split_bytes
        self._splits_finely = self.settings.expandable_segments
        self._special = self._splits_finely or self.settings.garbage_collection_threshold > 0
        limits_splits = self._max_split != UNLIMITED
        self.is_plain = not (self._special or self._rounds_by_powers or limits_splits)

    def malloc(self, nbytes: int, stream: int = 0) -> AllocatorBlock:
        """Books a block of at least `nbytes` > 0 for a stream; raises OutOfMemory."""
        size = (
            self._round(nbytes)
            if self._rounds_by_powers
            else (nbytes + ALLOCATION_GRANULE - 1) & -ALLOCATION_GRANULE
        )
        small = size <= SMALL_LIMIT
        pool = 2 * stream + small
        if pool >= len(self.pools):
            self.add_pools(pool + 1)
        free = self.pools[pool]
        block = free.best(size)
        if block is not None and (
            small or self._max_split == UNLIMITED or self._may_take(block.size, size)
        ):
            free.remove(block)
            if block.size == block.segment.size:
                self.whole -= block.size
                self.note_unreturnable()
        else:
            block = self.new_block(size, pool, nbytes)
            self.note_unreturnable()
        remaining = block.size - size
        if remaining and (
            small or self._splits_finely or (remaining > SMALL_LIMIT and size < self._max_split)
        ):
            segment, after, address = block.segment, block.after, block.address + size
            rest = AllocatorBlock(address, remaining, pool, segment)
            rest.before, rest.after = block, after
            if after is not None:
                after.before = rest
            else:
                segment.last = rest
            block.after, block.size = rest, size
            free.put(rest)
        block.free = False
        allocated = self.allocated = self.allocated + block.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if self._special:
            self._clock += 1
            block.segment.last_used = self._clock
            self.note_unreturnable()
        return block

    def note_unreturnable(self) -> None:
        """Called where it can have grown: at a new or no longer free segment, or (expandable) always."""
        now = self.reserved - self.whole
        if self._splits_finely:
            now = min(self.reserved, self.allocated + sum(map(self._page, range(len(self.pools)))))
        if now > self.peak_unreturnable:
            self.peak_unreturnable = now

    def free(self, block: AllocatorBlock, use: StreamUse | None = None) -> None:
        """Returns a block to its pool, merged with free neighbours: at once, or when what it waits
        for is done."""
        self.allocated -= block.size
        if use is not None and use.lag:
            self.waiting.add(block, use)
        else:
            self._put_back(block)

    def _put_back(self, block: AllocatorBlock) -> None:
        free, before, after = self.pools[block.pool], block.before, block.after
        if before is not None and before.free:
            free.remove(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            else:
                block.segment.last = before
            block = before
        if after is not None and after.free:
            free.remove(after)
            block.size += after.size
            after = block.after = after.after
            if after is not None:
                after.before = block
            else:
                block.segment.last = block
        block.free = True
        if block.size == block.segment.size:
            self.whole += block.size
        free.put(block)

    def empty_cache(self) -> int:
        """Returns every segment without a booked block to the device; gives the bytes returned."""
        returned = 0
        for block in self._free_blocks():
            if self._expandable[block.pool] is block.segment:
                returned += self._unmap(block)
            elif block.size == block.segment.size:
                returned += self._release(block)
        return returned

    def layout(self) -> object:
        """Where every free block is: with what is booked and what waits, all that follows from."""
        return [pool.layout() for pool in self.pools]

    def inactive_split_bytes(self) -> int:
        """Free bytes in segments that also hold booked blocks: what cannot be returned."""
        return sum(b.size for b in self._free_blocks() if b.size != b.segment.size)

    def add_pools(self, count: int) -> None:
        """Makes those that are missing of the first so many."""
        for _ in range(count - len(self.pools)):
            self.pools.append(FreeBlocks())
            self._expandable.append(None)

    def _free_blocks(self) -> list[AllocatorBlock]:
        """Those of all pools."""
        return [block for pool in self.pools for block in pool]

    def _round(self, nbytes: int) -> int:
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and nbytes > ALLOCATION_GRANULE * divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            step = floor // divisions
            return nbytes if nbytes == floor else floor + -(-(nbytes - floor) // step) * step
        return (nbytes + ALLOCATION_GRANULE - 1) // ALLOCATION_GRANULE * ALLOCATION_GRANULE

    def _may_take(self, found: int, size: int) -> bool:
        """max_split_size_mb: blocks above it serve no smaller request, and larger requests only
        within 20 MiB."""
        limit = self._max_split
        return not (size < limit <= found) and not (size >= limit and found >= size + LARGE_SEGMENT)

    def _segment_size(self, size: int, small: bool) -> int:
        if small:
            return SMALL_SEGMENT
        if size < LARGE_LIMIT:
            return self.settings.large_segment_bytes
        return (size + LARGE_ROUNDING - 1) // LARGE_ROUNDING * LARGE_ROUNDING

    def new_block(self, size: int, pool: int, nbytes: int) -> AllocatorBlock:
        """A block of a new segment; raises ReplayOutOfMemory where the limit leaves none."""
        settings = self.settings
        if settings.expandable_segments:
            return self._expand(size, pool, nbytes)
        want = self._segment_size(size, bool(pool & 1))
        if settings.garbage_collection_threshold and settings.limit_bytes != UNLIMITED:
            self._collect(want)
        if self.reserved + want > settings.limit_bytes:
            self.num_retries += 1
            self.waiting.done()  # release_cached_blocks synchronises first
            self.empty_cache()
            if self.reserved + want > settings.limit_bytes:
                raise ReplayOutOfMemory(nbytes, self.allocated, self.reserved, settings.limit_bytes)
        segment = AllocatorSegment(self.next_address, want, pool)
        self.next_address += want
        self.segments[segment.address] = segment
        block = AllocatorBlock(segment.address, want, pool, segment)
        segment.last = block
        self._grow(want)
        return block

    def _grow(self, nbytes: int) -> None:
        self.reserved += nbytes
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def _expand(self, size: int, pool: int, nbytes: int) -> AllocatorBlock:
        """Maps more pages (2 MiB small pool, 20 MiB large pool) at the end of the pool's one
        growing segment."""
        segment = self._expandable[pool]
        if segment is None:
            segment = self._expandable[pool] = AllocatorSegment(self.next_address, 0, pool)
            self.next_address += 1 << 46
            self.segments[segment.address] = segment
        if self.reserved + self._missing(segment, size) > self.settings.limit_bytes:
            self.num_retries += 1
            self.waiting.done()
            self.empty_cache()
        want = self._missing(segment, size)
        if self.reserved + want > self.settings.limit_bytes:
            raise ReplayOutOfMemory(
                nbytes, self.allocated, self.reserved, self.settings.limit_bytes
            )
        block = self._lengthened(segment, want)
        segment.size += want
        self._grow(want)
        return block

    def _lengthened(self, segment: AllocatorSegment, want: int) -> AllocatorBlock:
        """The free block at a growing segment's end, with `want` bytes more; out of its pool."""
        last = segment.last
        if last is not None and last.free and last.size:
            self._forget(last)
            last.size += want
            return last
        block = AllocatorBlock(segment.address + segment.size, want, segment.pool, segment)
        block.before = last
        if last is not None:
            last.after = block
        segment.last = block
        return block

    def _page(self, pool: int) -> int:
        """Bytes that a growing segment maps and unmaps at a time."""
        return SMALL_SEGMENT if pool & 1 else self.settings.large_segment_bytes

    def _missing(self, segment: AllocatorSegment, size: int) -> int:
        """Bytes to map at a growing segment's end for a block of `size` there."""
        last, page = segment.last, self._page(segment.pool)
        tail = last.size if last is not None and last.free else 0
        return -(-(size - tail) // page) * page

    def _forget(self, block: AllocatorBlock) -> None:
        """Takes a free block out of its pool."""
        self.pools[block.pool].remove(block)
        if block.size == block.segment.size:
            self.whole -= block.size

    def _release(self, block: AllocatorBlock) -> int:
        self._forget(block)
        del self.segments[block.segment.address]
        self.reserved -= block.size
        return block.size

    def _unmap(self, block: AllocatorBlock) -> int:
        """Unmaps the whole pages of a free block of a growing segment; a hole stays in its place,
        and what shares pages with others is kept.

        Source: torch c10/cuda/CUDACachingAllocator.cpp release_blocks, unmap_block. Holes are not
        mapped again here: pages come at the end.
        """
        segment, page = block.segment, self._page(block.pool)
        offset = block.address - segment.address
        start, end = -(-offset // page) * page, (offset + block.size) // page * page
        if end <= start:
            return 0
        self._forget(block)
        pieces = [
            (offset, start - offset, True),
            (start, end - start, False),
            (end, offset + block.size - end, True),
        ]
        if block.after is None:  # at the segment's end, which recedes
            pieces = pieces[:1]
            segment.size = start
        self._replace(block, pieces)
        self.reserved -= end - start
        return end - start

    def _replace(self, block: AllocatorBlock, pieces: list[tuple[int, int, bool]]) -> None:
        """Puts (offset in the segment, size, free) pieces in the place of a forgotten block."""
        segment, before, after = block.segment, block.before, block.after
        for where, size, free in pieces:
            if not size:
                continue
            piece = AllocatorBlock(segment.address + where, size, block.pool, segment)
            piece.before, piece.free = before, free
            if before is not None:
                before.after = piece
            if free:
                self.pools[piece.pool].put(piece)
            before = piece
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        else:
            segment.last = before

    def _collect(self, want: int) -> None:
        """Returns the least recently used cached segments while reserved is above the threshold."""
        threshold = self.settings.garbage_collection_threshold * self.settings.limit_bytes
        if self.reserved + want <= threshold:
            return
        whole = sorted(
            (b for b in self._free_blocks() if b.size == b.segment.size),
            key=lambda b: b.segment.last_used,
        )
        for block in whole:
            if self.reserved + want <= threshold:
                return
            self._release(block)
