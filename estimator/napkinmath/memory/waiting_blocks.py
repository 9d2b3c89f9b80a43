"""Blocks whose tensors went while another stream still used them.

`record_stream` makes the allocator note an event of that stream when the tensor goes, and use the
block again only after it. Allocated bytes fall at once, reserved ones cannot serve meanwhile. When
the event has passed is a matter of time; what bounds it is the engine: FSDP 1 lets the host run two
gathers ahead. So blocks wait in groups, one a unit, until so many later groups have gone. Sources:
torch c10/cuda/CUDACachingAllocator.cpp free, insert_events, process_events,
synchronize_and_free_events; distributed/fsdp/_limiter_utils.py _FreeEventQueue.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.ledger import StreamUse
    from napkinmath.memory.allocator import AllocatorBlock


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
