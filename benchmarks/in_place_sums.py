"""CUDA's in-place sums of gradients, put back into a trace.

The engine adds a second gradient into the first where nobody else holds it (torch/csrc/autograd/input_buffer.cpp,
can_accumulate_inplace). Under a TorchDispatchMode, which a trace needs, that test is always false, so a trace shows a new
tensor for every such sum. Here the sum takes over the storage of its first operand where that operand dies at once.
"""

from __future__ import annotations

from dataclasses import replace

from napkinmath_profiler.tracing.storage_events import StorageEvent, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult


def sum_in_place(result: TraceResult) -> TraceResult:
    """The same trace with the engine's sums in place; one that has them in place already is returned unchanged."""
    dropped, taken_over = _sums(result)
    events: list[StorageEvent] = []
    for index, event in enumerate(result.events):
        if index in dropped:
            continue
        owner = event.storage_id
        while not event.is_allocation and owner in taken_over:
            owner = taken_over[owner]
        events.append(event if owner == event.storage_id else event._replace(storage_id=owner))
    return replace(result, events=events, _cache={})


def _sums(result: TraceResult) -> tuple[set[int], dict[int, int]]:
    """Events that do not happen on CUDA (a sum's allocation, its first operand's death), and whose storage each sum takes over."""
    events, records = result.events, result.records
    dropped: set[int] = set()
    taken_over: dict[int, int] = {}
    newest: dict[tuple[int, str], int] = {}
    for index, event in enumerate(events):
        record = records[event.storage_id]
        if not event.is_allocation:
            continue
        key = (record.rounded_bytes, record.dtype)
        if event.phase is TracePhase.BACKWARD and event.op.startswith("aten.add.T"):
            freed = _freed_at_once(result, index)
            first = [position for position in freed if events[position].storage_id != newest.get(key)]
            if len(freed) > 1 or first:
                position = first[0] if first else freed[0]
                dropped |= {index, position}
                taken_over[event.storage_id] = events[position].storage_id
        newest[key] = event.storage_id
    return dropped, taken_over


def _freed_at_once(result: TraceResult, index: int) -> list[int]:
    """Positions of the frees right after a sum that are of its size and type: its operands that nobody else holds."""
    events, records = result.events, result.records
    made = records[events[index].storage_id]
    found: list[int] = []
    for position in range(index + 1, len(events)):
        if events[position].is_allocation:
            break
        record = records[events[position].storage_id]
        if (record.rounded_bytes, record.dtype) == (made.rounded_bytes, made.dtype):
            found.append(position)
    return found
