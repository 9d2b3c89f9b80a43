"""A timeline as a Chrome / Perfetto trace: memory by role as counters, phases and the largest
tensors as bars."""

from __future__ import annotations

import json
import os
from itertools import chain, repeat
from typing import Any

from napkinmath.base.whole_file import write_whole
from napkinmath.ir.timeline import Timeline

from napkinmath_profiler.snapshot.spelled_out import refuse_long

MAX_COUNTERS = 20_000
MAX_TENSORS = 400
MEMORY, PHASES, TENSORS = 1, 2, 3  # process ids: one group of rows each


def write_chrome_trace(
    timeline: Timeline, path: str | os.PathLike[str], *, force: bool = False
) -> None:
    """Write the JSON that chrome://tracing and ui.perfetto.dev open."""
    text = json.dumps({"traceEvents": chrome_events(timeline), "displayTimeUnit": "ms"})
    write_whole(path, text, force=force)


def chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The trace events; without seconds an event of the timeline takes a microsecond. InputError
    for a run of too many."""
    refuse_long(timeline, "a Chrome trace")
    names = ((MEMORY, "memory by role"), (PHASES, "phases"), (TENSORS, "largest tensors"))
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in names
    ]
    born: dict[int, list[int]] = {}
    lives: list[tuple[int, int, int]] = []
    totals: dict[str, int] = {}
    samples: list[tuple[int, dict[str, int]]] = []
    clock = 0
    for segment in timeline.segments:
        start = clock
        for action, index in chain.from_iterable(repeat(segment.events, segment.repeat)):
            if action == "!":
                continue
            clock += 1
            old, new = segment.pairs[index] if action == "=" else (index, index)
            if action != "+":
                lives.append((old, born[old].pop(), clock))
                _add(totals, timeline, old, -1)
            if action != "-":
                born.setdefault(new, []).append(clock)
                _add(totals, timeline, new, 1)
            samples.append((clock, dict(totals)))
        if clock > start:
            what = {"name": segment.name, "cat": segment.phase.value}
            found.append(_bar(PHASES, 1, what, start, clock))
    lives += [(index, moment, clock) for index, moments in born.items() for moment in moments]
    return found + _counters(samples) + _tensors(timeline, lives)


def _bar(group: int, row: int, what: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Something that lasts, on one row of a group."""
    return {"ph": "X", "pid": group, "tid": row, **what, "ts": start, "dur": end - start}


def _add(totals: dict[str, int], timeline: Timeline, index: int, sign: int) -> None:
    tensor = timeline.tensors[index]
    totals[tensor.role.value] = totals.get(tensor.role.value, 0) + sign * tensor.requested


def _counters(samples: list[tuple[int, dict[str, int]]]) -> list[dict[str, Any]]:
    """At most MAX_COUNTERS samples, the highest of each stretch."""
    stride = max(1, -(-len(samples) // MAX_COUNTERS))
    highest = [
        max(samples[i : i + stride], key=lambda sample: sum(sample[1].values()))
        for i in range(0, len(samples), stride)
    ]
    return [
        {"ph": "C", "pid": MEMORY, "name": "bytes", "ts": clock, "args": totals}
        for clock, totals in highest
    ]


def _tensors(timeline: Timeline, lives: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The largest tensors as bars, each on the first row that is free."""
    largest = sorted(lives, key=lambda life: -timeline.tensors[life[0]].requested)[:MAX_TENSORS]
    rows: list[int] = []
    found: list[dict[str, Any]] = []
    for index, start, end in sorted(largest, key=lambda life: life[1]):
        row = next((i for i, busy_until in enumerate(rows) if busy_until <= start), len(rows))
        if row == len(rows):
            rows.append(0)
        rows[row] = end
        tensor = timeline.tensors[index]
        details = {
            "bytes": tensor.requested,
            "role": tensor.role.value,
            "module": tensor.module,
            "dtype": tensor.dtype,
        }
        bar = _bar(TENSORS, row + 1, {"name": tensor.name or tensor.source}, start, end)
        found.append({**bar, "args": details})
    return found
