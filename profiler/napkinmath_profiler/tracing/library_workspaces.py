"""What torch allocates for cuBLAS and keeps: no operation of the trace asks for it, so it is put
beside the operations that make it.

Source: torch 2.11 aten/src/ATen/cuda/CublasHandlePool.cpp getCUDABlasLtWorkspace: one a thread and
stream, on the thread's first product, through the caching allocator. The forward runs on the
caller's thread, the backward on autograd's.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right

from napkinmath_profiler.tracing.storage_events import (
    StorageEvent,
    StorageRecord,
    StorageRole,
    TracePhase,
)
from napkinmath_profiler.tracing.trace_result import TraceResult

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv"})
THREADS = (
    ("forward", (TracePhase.FORWARD, TracePhase.LOSS)),
    ("backward", (TracePhase.BACKWARD, TracePhase.RECOMPUTE)),
)


def with_product_workspaces(result: TraceResult, nbytes: int) -> TraceResult:
    """``result`` with ``nbytes`` more on each thread's first product, never returned; as it is for
    0 bytes.

    The bytes are a GPU's: ``Gpu.cublas_workspace_bytes``.
    """
    firsts = sorted(
        (place, name)
        for name, phases in THREADS
        if (place := _first_product(result, phases)) is not None
    )
    if not nbytes or not firsts:
        return result
    places = [place for place, _ in firsts]
    made = [
        _workspace(result, place, number, name, nbytes)
        for number, (place, name) in enumerate(firsts)
    ]
    events = list(result.events)
    for place, record in reversed(list(zip(places, made, strict=True))):
        events.insert(place, _birth(record))
    moved = [_moved(record, places) for record in result.records]
    marks = {name: index + bisect_right(places, index) for name, index in result.marks.items()}
    return dataclasses.replace(
        result, records=[*moved, *made], events=events, marks=marks, _cache={}
    )


def _workspace(
    result: TraceResult, place: int, number: int, name: str, nbytes: int
) -> StorageRecord:
    """A workspace born right before the event at ``place``, after ``number`` others."""
    before = result.events[place]
    return StorageRecord(
        storage_id=len(result.records) + number,
        requested_bytes=nbytes,
        shape=(nbytes,),
        dtype="uint8",
        op="cuBLAS",
        module="",
        phase=before.phase,
        step=before.step,
        micro_step=before.micro_step,
        born=place + number,
        scope=result.records[before.storage_id].scope,
        role=StorageRole.WORKSPACE,
        name=f"cuBLAS workspace, {name}",
    )


def _birth(record: StorageRecord) -> StorageEvent:
    return StorageEvent(
        True,
        record.storage_id,
        record.phase,
        record.module,
        record.op,
        record.step,
        record.micro_step,
    )


def _first_product(result: TraceResult, phases: tuple[TracePhase, ...]) -> int | None:
    """Index of the event at which the first product of these phases allocates its output."""
    for index, event in enumerate(result.events):
        if (
            event.is_allocation
            and event.phase in phases
            and _is_product(result.records[event.storage_id].op)
        ):
            return index
    return None


def _is_product(op: str) -> bool:
    return op.removeprefix("aten.").partition(".")[0] in PRODUCTS


def _moved(record: StorageRecord, places: list[int]) -> StorageRecord:
    died = record.died if record.died is None else record.died + bisect_right(places, record.died)
    return dataclasses.replace(
        record, born=record.born + bisect_right(places, record.born), died=died
    )
