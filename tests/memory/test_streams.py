"""Pools of streams and blocks that wait for one, worked out by hand from
c10/cuda/CUDACachingAllocator.cpp and torch's FSDP."""

from __future__ import annotations

import pytest
from napkinmath.base.units import MIB
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import StreamUse
from napkinmath.memory.allocator import CachingAllocator, ReplayOutOfMemory
from napkinmath.memory.allocator_settings import AllocatorSettings
from napkinmath.memory.replay import replayed

COMPUTE, SIDE = 0, 1
LENT = StreamUse(SIDE, "gathered", lag=1)


def test_a_freed_block_serves_its_own_stream_alone() -> None:
    """get_free_block: `if (it == pool.blocks.end() || (*it)->stream != p.stream()) return false`."""
    allocator = CachingAllocator()
    for size in (40 * MIB, MIB):
        side = allocator.malloc(size, SIDE)
        allocator.free(side)
        other = allocator.malloc(size, COMPUTE)
        assert other.segment is not side.segment
        assert allocator.malloc(size, SIDE).address == side.address
    assert allocator.reserved == 80 * MIB + 4 * MIB


def test_a_recorded_block_waits_for_the_next_group() -> None:
    """free: allocated falls at once; insert_events keeps the block until its event has passed."""
    allocator = CachingAllocator()
    first = allocator.malloc(40 * MIB, SIDE)
    allocator.free(first, LENT)
    assert (allocator.allocated, allocator.reserved) == (0, 40 * MIB)
    second = allocator.malloc(40 * MIB, SIDE)
    assert second.segment is not first.segment
    allocator.free(second, LENT)
    assert allocator.malloc(40 * MIB, SIDE).address == first.address
    assert allocator.reserved == 80 * MIB


def test_a_group_waits_as_a_whole() -> None:
    """Tensors of one unit go together: only the last of them closes it."""
    allocator = CachingAllocator()
    opening = StreamUse(SIDE, "gathered", lag=1, closes=False)
    one, two = allocator.malloc(40 * MIB, SIDE), allocator.malloc(60 * MIB, SIDE)
    allocator.free(one, opening)
    allocator.free(two, LENT)
    assert allocator.malloc(40 * MIB, SIDE).segment not in (one.segment, two.segment)
    allocator.waiting.done()
    assert allocator.malloc(60 * MIB, SIDE).address == two.address


def test_a_full_device_waits_for_all_streams_before_it_gives_up() -> None:
    """release_cached_blocks begins with synchronize_and_free_events."""
    allocator = CachingAllocator(AllocatorSettings(limit_bytes=100 * MIB))
    allocator.free(allocator.malloc(60 * MIB, SIDE), LENT)
    allocator.malloc(80 * MIB)
    assert (allocator.reserved, allocator.num_retries) == (80 * MIB, 1)
    with pytest.raises(ReplayOutOfMemory):
        allocator.malloc(30 * MIB, SIDE)


def test_each_stream_grows_a_segment_of_its_own() -> None:
    """try_allocate_expandable_block looks for a segment of the stream."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    blocks = [allocator.malloc(15 * MIB, stream) for stream in (COMPUTE, SIDE, COMPUTE)]
    assert len(allocator.segments) == 2 and allocator.reserved == 60 * MIB
    assert blocks[2].before is blocks[0]


def test_fsdp1_holds_its_streams_pools_beside_those_of_computation() -> None:
    """Forward: a layer, and the one before, whose event has not passed; backward: also the next
    one, which is asked for early. What is reduced is of a third pool."""
    config = TrainConfig(
        sequence_length=512,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
        parallel=ParallelConfig(data_parallel=DataParallel.FSDP1, data_parallel_size=4),
    )
    e = estimate("llama-2-7b", config)
    uses = [t.use for t in e.timeline.tensors]
    one_pool = replayed(e.timeline.segments, [t.nbytes for t in e.timeline.tensors])
    assert e.replay.peak_allocated == pytest.approx(one_pool.peak_allocated, rel=0.002)
    layer = max(
        t.nbytes
        for t in e.timeline.tensors
        if t.name == "gathered flat parameter" and t.nbytes < 5e8
    )
    more = e.replay.peak_reserved - one_pool.peak_reserved
    assert more > layer and any(uses)
    free = config.replace(parallel=config.parallel.replace(limit_all_gathers=False))
    assert estimate("llama-2-7b", free).replay.peak_reserved > e.replay.peak_reserved + 10 * layer
