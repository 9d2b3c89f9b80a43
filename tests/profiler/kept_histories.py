"""Histories that the campaign keeps (campaign_parts/measured.py save_events), replayed."""

from __future__ import annotations

from typing import Any

from napkinmath.allocator import CachingAllocator


def replayed(row: dict[str, Any]) -> tuple[int, int]:
    """Peak allocated and reserved bytes of a kept history under the allocator's rules."""
    books, blocks = CachingAllocator(), {}
    for storage, nbytes, *_ in row["events"]:
        if nbytes and storage >= 0:
            blocks[storage] = books.malloc(nbytes)
        elif nbytes:
            books.free(blocks.pop(-1 - storage))
    return books.peak_allocated, books.peak_reserved
