"""The books that write `malloc` and `free` out are those of the two functions."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath.base.cuda import SMALL_LIMIT
from napkinmath.base.units import MIB
from napkinmath.memory import plain_books
from napkinmath.memory.allocator import CachingAllocator, ReplayOutOfMemory
from napkinmath.memory.allocator_settings import UNLIMITED, AllocatorSettings
from napkinmath.memory.blocks import AllocatorBlock
from napkinmath.memory.plain_books import PlainBooks

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 80 * MIB))
# a few sizes that come again, so that blocks are found, split and merged
FAMILIES = st.lists(SIZES, min_size=1, max_size=6)


def drawn_events(sizes: list[int], count: int, choices) -> list[tuple[str, int]]:
    """Allocations and frees in any order; of a tensor the last block is freed first."""
    live, events = list[int](), list[tuple[str, int]]()
    for _ in range(count):
        if live and choices.random() < 0.48:
            events.append(("-", live.pop(choices.randrange(len(live)))))
        else:
            live.append(choices.randrange(len(sizes)))
            events.append(("+", live[-1]))
    return events


def layer(sizes: list[int], count: int, choices) -> list[tuple[str, int]]:
    """Events that leave the small pool as many blocks as they found, and of the large one keep the
    last."""
    events = drawn_events(sizes, count, choices)
    live = list[int]()
    for action, index in events:
        if action == "+":
            live.append(index)
        else:
            live.remove(index)
    choices.shuffle(live)
    kept = next((index for index in live if sizes[index] > SMALL_LIMIT), -1)
    if kept >= 0:
        live.remove(kept)
    return [*events, *(("-", index) for index in live)]


def layout(allocator: CachingAllocator, held: list[list[AllocatorBlock]]) -> object:
    """All that two allocators may differ in."""
    figures = (
        "allocated",
        "reserved",
        "peak_allocated",
        "peak_reserved",
        "peak_unreturnable",
        "num_retries",
        "next_address",
    )
    segments = [(s.address, s.size, walked(s.last)) for s in allocator.segments.values()]
    return (
        [getattr(allocator, name) for name in figures],
        allocator.layout(),
        segments,
        [[(block.address, block.size) for block in blocks] for blocks in held],
    )


def walked(block: AllocatorBlock | None) -> list[tuple[int, int, bool]]:
    """A segment's blocks from its last to its first."""
    found = list[tuple[int, int, bool]]()
    while block is not None:
        found.append((block.address, block.size, block.free))
        block = block.before
    return found


def played(
    sizes: list[int], runs: list[tuple[list[tuple[str, int]], int]], limit: int
) -> tuple[object, object]:
    """All that follows from events that come so many times, by the two functions and written out."""
    one, other = (CachingAllocator(AllocatorSettings(limit_bytes=limit)) for _ in range(2))
    one.add_pools(2)
    held, written = ([list[AllocatorBlock]() for _ in sizes] for _ in range(2))
    failed, wrote = "", ""
    try:
        for events, times in runs:
            for action, index in events * times:
                if action == "+":
                    held[index].append(one.malloc(sizes[index]))
                else:
                    one.free(held[index].pop())
    except ReplayOutOfMemory as error:
        failed = str(error)
    books = PlainBooks(other, sizes, written)
    try:
        for events, times in runs:
            books.play(events, [], times)
    except ReplayOutOfMemory as error:
        wrote = str(error)
    return (failed, layout(one, held)), (wrote, layout(other, written))


@settings(max_examples=150, deadline=None)
@given(
    sizes=FAMILIES,
    count=st.integers(1, 120),
    limit=st.sampled_from([UNLIMITED, 64 * MIB, 256 * MIB]),
    times=st.integers(1, 3),
    choices=st.randoms(use_true_random=False),
)
def test_written_out_they_are_block_by_block_the_same(
    sizes: list[int], count: int, limit: int, times: int, choices
) -> None:
    events = drawn_events(sizes, count, choices)
    expected, found = played(sizes, [(events, times)], limit)
    assert expected == found


@pytest.mark.parametrize("limit", (UNLIMITED, 128 * MIB, 256 * MIB, 512 * MIB))
def test_layers_that_settle_in_the_small_pool_are_block_by_block_the_same(limit: int) -> None:
    for seed in range(50):
        choices = random.Random(seed)
        small = [choices.randrange(1, MIB) for _ in range(choices.randint(1, 4))]
        large = [choices.randrange(MIB + 1, 24 * MIB) for _ in range(choices.randint(1, 3))]
        sizes, freed = [*small, *large, MIB], choices.randint(0, 12)
        cached = [("+", len(sizes) - 1)] * freed + [("-", len(sizes) - 1)] * freed
        repeated = layer(sizes, choices.randint(8, 60), choices), choices.randint(3, 24)
        with patch.multiple(plain_books, LONG=0):
            expected, found = played(sizes, [(cached, 1), repeated, (cached, 1)], limit)
        assert expected == found, seed


def test_a_settled_layer_plays_the_large_pool_alone() -> None:
    sizes = [4096, 2 * MIB]
    events = [("+", 0), ("+", 1), ("-", 0)] * 50
    lengths: list[int] = []
    play = PlainBooks._play

    def counted(self: PlainBooks, ready) -> None:
        lengths.append(len(ready))
        play(self, ready)

    with patch.multiple(PlainBooks, _play=counted), patch.multiple(plain_books, LONG=0):
        expected, found = played(sizes, [(events, 20)], UNLIMITED)
    assert expected == found
    assert lengths.count(len(events)) == 2  # once more to see that nothing changed
    # the large requests, and what is booked and cut before the first and after the last
    assert lengths.count(50 + 2 * 2) == 18


def test_settings_that_change_how_a_request_is_served_are_not_plain() -> None:
    changed = (
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(max_split_bytes=64 * MIB),
        AllocatorSettings(roundup_power2_divisions=4),
        AllocatorSettings(garbage_collection_threshold=0.8),
    )
    assert not any(CachingAllocator(settings).is_plain for settings in changed)
    assert CachingAllocator(AllocatorSettings(limit_bytes=1 << 30)).is_plain
