"""The sizes of a growing cache that the allocator is shown hold what every token would."""

from __future__ import annotations

import pytest
from agreement.tiny_configs import TINY
from napkinmath.estimate import estimate
from napkinmath.lowering.generation import _SIZES_SHOWN
from napkinmath.memory.allocator import CachingAllocator

# A tensor that grows by more than 8 MiB passes sizes that are not shown.
SHOWN_GROWTH = 8 << 20
TOLERANCE = 0.2
LAYERS = 4


def held(token: int, first: int, points: list[int]) -> int:
    """Reserved after keys and values of all layers have had these lengths, one after the other."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(first * token) for _ in range(2 * LAYERS)]
    for length in points:
        for index, old in enumerate(blocks):
            blocks[index] = allocator.malloc(length * token)
            allocator.free(old)
    return allocator.peak_reserved


@pytest.mark.parametrize(
    ("token", "first", "last"),
    [(8192, 2049, 3072), (8192, 100, 1100), (512, 200, 456), (4096, 512, 1024), (2048, 1000, 5000)],
)
def test_shown_sizes_hold_what_every_token_does(token: int, first: int, last: int) -> None:
    assert (last - first) * token <= SHOWN_GROWTH
    grown = [
        last - first - (last - first) * (_SIZES_SHOWN - n) // _SIZES_SHOWN
        for n in range(1, _SIZES_SHOWN + 1)
    ]
    every = held(token, first, list(range(first + 1, last + 1)))
    shown = held(token, first, [first + more for more in grown])
    assert shown == pytest.approx(every, rel=TOLERANCE)


def test_one_jump_holds_much_less() -> None:
    every = held(8192, 2049, list(range(2050, 3073)))
    assert held(8192, 2049, [3072]) < 0.5 * every


@pytest.mark.parametrize("family", ["llama", "t5", "granitemoehybrid", "gemma3_text", "mamba2"])
def test_what_does_not_grow_stays_and_all_is_returned(family: str) -> None:
    """States and an encoder's keys are made once."""
    found = estimate(dict(TINY[family]), bs=2, ctx=64, generate=40).replay
    assert found.end_allocated < found.peak_allocated <= found.peak_reserved
