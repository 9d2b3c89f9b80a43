"""A recorded snapshot in which every block says what it is, where its call stack would stand.

PyTorch's memory_viz shows a block's frames; without recorded stacks there are none, and the owner,
role and module that the measurement found take their place. With stacks they come on top of them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from napkinmath.base.whole_file import write_whole

from napkinmath_profiler.tracing.storage_events import StorageRecord, StorageRole
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import ROLES

Frames = list[dict[str, Any]]
OF_BLOCKS = ("alloc", "free_requested", "free_completed")


def label_snapshot(
    snapshot: dict[str, Any],
    result: TraceResult,
    present: Mapping[int, StorageRecord] | None = None,
    *,
    device_index: int = 0,
) -> dict[str, Any]:
    """``snapshot`` with labels on the events that ``result`` was read from, and on the blocks that
    were alive at its end.

    ``present`` says by address what was there before the recording, which has no event.
    """
    live = {address: _frames(record) for address, record in (present or {}).items()}
    recorded = iter([r for r in result.records if r.phase.value != "setup"])
    trace: list[dict[str, Any]] = []
    for entry in snapshot["device_traces"][device_index]:
        action, address = entry["action"], entry.get("addr", 0)
        if action == "alloc":
            record = next(recorded, None)
            if record is not None:
                live[address] = _frames(record)
        label = live.get(address, []) if action in OF_BLOCKS else []
        frames = {"frames": [*label, *(entry.get("frames") or [])]} if label else {}
        trace.append({**entry, **frames})
        if action == "free_completed":
            live.pop(address, None)
    traces = list(snapshot["device_traces"])
    traces[device_index] = trace
    segments = [_labelled_segment(s, live) for s in snapshot["segments"]]
    return {**snapshot, "device_traces": traces, "segments": segments}


def _labelled_segment(segment: dict[str, Any], live: dict[int, Frames]) -> dict[str, Any]:
    def labelled(blocks: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        address = segment["address"]
        for block in blocks:
            label = (
                live.get(block.get("address", address), [])
                if block.get("state") == "active_allocated"
                else []
            )
            yield {**block, "frames": [*label, *(block.get("frames") or [])]} if label else block
            address += block["size"]

    return {**segment, "blocks": list(labelled(segment["blocks"]))}


def _frames(record: StorageRecord) -> Frames:
    """Owner, role and module in the order in which ``snapshot.write_snapshot`` writes them."""
    role = ROLES[record.role or StorageRole.UNATTRIBUTED].value
    names = (record.name or record.op or record.phase.value, role, record.module or "(root)")
    return [{"name": name, "filename": "napkinmath", "line": 0} for name in names]


def write_labelled(
    snapshot: dict[str, Any],
    result: TraceResult,
    path: str | os.PathLike[str],
    present: Mapping[int, StorageRecord] | None = None,
    *,
    device_index: int = 0,
    force: bool = False,
) -> None:
    """Pickle the labelled snapshot, whole or not at all."""
    labelled = label_snapshot(snapshot, result, present, device_index=device_index)
    write_whole(path, lambda file: pickle.dump(labelled, file, protocol=4), force=force)
