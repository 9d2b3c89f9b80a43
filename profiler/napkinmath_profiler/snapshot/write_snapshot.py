"""A timeline as a CUDA memory snapshot that PyTorch's own memory_viz reads: segments, blocks and
the event trace."""

from __future__ import annotations

import os
import pickle
from typing import Any

from napkinmath.base.whole_file import write_whole
from napkinmath.ir.timeline import TensorInfo, Timeline
from napkinmath.memory.allocator import CachingAllocator
from napkinmath.memory.allocator_settings import AllocatorSettings
from napkinmath.memory.blocks import AllocatorBlock

from napkinmath_profiler.snapshot.spelled_out import refuse_long

BASE_ADDRESS = 0x7F00_0000_0000
EVENT_MICROSECONDS = (
    1  # a predicted event has an order, not a time; a microsecond each keeps plots readable
)
STREAM = 0


def write_snapshot(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    settings: AllocatorSettings | None = None,
    force: bool = False,
) -> None:
    """Replay ``timeline`` and pickle what ``torch.cuda.memory._snapshot()`` would have given."""
    snapshot = snapshot_of(timeline, settings)
    write_whole(path, lambda file: pickle.dump(snapshot, file, protocol=4), force=force)


def snapshot_of(timeline: Timeline, settings: AllocatorSettings | None = None) -> dict[str, Any]:
    """The snapshot dict: ``segments``, ``device_traces``, ``allocator_settings``,
    ``external_annotations``. InputError for a run of too many events."""
    refuse_long(timeline, "a snapshot")
    return _Recorder(timeline, settings).run()


class _Recorder:
    def __init__(self, timeline: Timeline, settings: AllocatorSettings | None) -> None:
        self._timeline = timeline
        self._settings = settings or AllocatorSettings()
        self._allocator = CachingAllocator(self._settings)
        self._frames = [_frames(tensor) for tensor in timeline.tensors]
        self._trace: list[dict[str, Any]] = []
        self._segments: dict[int, int] = {}
        self._owner: dict[int, int] = {}  # address of a booked block -> tensor
        self._clock = 0

    def run(self) -> dict[str, Any]:
        held: list[list[AllocatorBlock]] = [[] for _ in self._timeline.tensors]
        for segment, _, action, index in self._timeline.events():
            if action == "+" and self._timeline.tensors[index].nbytes:
                held[index].append(self._allocate(index))
            elif action == "-" and self._timeline.tensors[index].nbytes:
                self._free(held[index].pop(), index)
            elif action == "=":
                old, new = segment.pairs[index]
                if self._timeline.tensors[old].nbytes:
                    held[new].append(held[old].pop())
        return {
            "segments": [self._segment(address) for address in sorted(self._allocator.segments)],
            "device_traces": [self._trace],
            "allocator_settings": {
                "expandable_segments": self._settings.expandable_segments,
                "roundup_power2_divisions": {},
                "garbage_collection_threshold": self._settings.garbage_collection_threshold,
            },
            "external_annotations": [],
        }

    def _allocate(self, index: int) -> AllocatorBlock:
        block = self._allocator.malloc(self._timeline.tensors[index].nbytes)
        self._note_segments()
        self._owner[block.address] = index
        self._note(
            "alloc", block.address, self._timeline.tensors[index].nbytes, self._frames[index]
        )
        return block

    def _free(self, block: AllocatorBlock, index: int) -> None:
        size = self._timeline.tensors[index].nbytes
        self._note("free_requested", block.address, size, self._frames[index])
        self._note("free_completed", block.address, size, self._frames[index])
        del self._owner[block.address]
        self._allocator.free(block)

    def _note_segments(self) -> None:
        """Segments that came, grew or went since the last look."""
        now = {address: segment.size for address, segment in self._allocator.segments.items()}
        if now == self._segments:
            return
        mapped = self._settings.expandable_segments
        for address in self._segments.keys() - now.keys():
            self._note(
                "segment_unmap" if mapped else "segment_free", address, self._segments[address], []
            )
        for address, size in now.items():
            before = self._segments.get(address, 0)
            if size > before:
                self._note(
                    "segment_map" if mapped else "segment_alloc",
                    address + before,
                    size - before,
                    [],
                )
        self._segments = now

    def _note(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        self._clock += EVENT_MICROSECONDS
        self._trace.append(
            {
                "action": action,
                "addr": BASE_ADDRESS + address,
                "size": size,
                "stream": STREAM,
                "time_us": self._clock,
                "frames": frames,
            }
        )

    def _block(self, block: AllocatorBlock) -> dict[str, Any]:
        owner = None if block.free else self._owner.get(block.address)
        return {
            "address": BASE_ADDRESS + block.address,
            "size": block.size,
            "requested_size": 0 if owner is None else self._timeline.tensors[owner].nbytes,
            "state": "inactive" if block.free else "active_allocated",
            "frames": [] if owner is None else self._frames[owner],
        }

    def _segment(self, address: int) -> dict[str, Any]:
        segment = self._allocator.segments[address]
        blocks: list[dict[str, Any]] = []
        block = segment.last
        while block is not None:
            blocks.append(self._block(block))
            block = block.before
        blocks.reverse()
        active = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        return {
            "device": 0,
            "address": BASE_ADDRESS + address,
            "total_size": segment.size,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(b["requested_size"] for b in blocks),
            "stream": STREAM,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self._settings.expandable_segments,
            "frames": [],
            "blocks": blocks,
        }


def _frames(tensor: TensorInfo) -> list[dict[str, Any]]:
    """What stands in for a call stack: the tensor, its role, its module."""
    names = (tensor.name or tensor.source, tensor.role.value, tensor.module or "(root)")
    return [{"name": name, "filename": "napkinmath", "line": 0} for name in names if name]
