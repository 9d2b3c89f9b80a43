"""Write out the events of a whole model from those of a shorter one that has every kind of layer in
every surrounding.

In every phase the layers take turns: up in the forward, down in the backward, up again in each
multi-tensor operation of the optimizer. One such turn is a *sweep*, one layer's part of it a
*chunk*. A missing layer's chunk is a copy of the chunk of a layer in the same context, in which
every storage of a layer ``d`` places away becomes that of the layer ``d`` places away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

from napkinmath_profiler.tracing.kernel_workspaces import FOREACH_NORM_PARTIALS
from napkinmath_profiler.tracing.layer_stacks import WINDOW, LayerStack, contexts
from napkinmath_profiler.tracing.layer_sweeps import Chunk, LayerPaths, Sweep, parts_of
from napkinmath_profiler.tracing.storage_events import (
    StorageEvent,
    StorageRecord,
    StorageRole,
    TracePhase,
)
from napkinmath_profiler.tracing.trace_result import TraceResult


class NotRepeating(Exception):
    """The events do not repeat as extrapolation needs; the whole model must be traced."""


_VALUES = attrgetter(*(entry.name for entry in fields(StorageRecord)))


def extrapolated(result: TraceResult, stack: LayerStack, kept: Sequence[int]) -> TraceResult:
    """``result``, traced with only the ``kept`` layers of ``stack``, as the trace of all of them;
    raises NotRepeating."""
    return _Extrapolation(result, stack, kept).run()


class _Extrapolation:
    def __init__(self, result: TraceResult, stack: LayerStack, kept: Sequence[int]) -> None:
        self._old, self._stack, self._kept = result, stack, list(kept)
        self._paths = LayerPaths(stack.path)
        self._total = len(stack.kinds)
        # kept positions in equal contexts, whose events must be alike
        self._twins: list[tuple[int, int]] = []
        self._sample_of = self._samples()
        self._records: list[StorageRecord] = []
        self._events: list[StorageEvent] = []
        # event index: short -> whole, for events outside and of kept layers
        self._moved: dict[int, int] = {}
        self._born: dict[tuple[int, int, int], int] = {}  # (sweep, layer, birth in chunk) -> record
        self._outside: dict[int, int] = {}  # record outside any sweep: short -> whole
        self._num_gradients: dict[int, int] = {}
        # short record -> (sweep, kept position, birth in chunk)
        self._home: dict[int, tuple[int, int, int]] = {}

    def _samples(self) -> list[int]:
        """For each layer of the whole, the position of the kept layer whose chunks it copies: its
        own, where that sees the same."""
        kinds = self._stack.kinds
        whole, short = contexts(kinds), contexts([kinds[i] for i in self._kept])
        by_context: dict[object, int] = {}
        for position, context in enumerate(short):
            first = by_context.setdefault(context, position)
            if first != position:
                self._twins.append((first, position))
        if any(context not in by_context for context in whole):
            raise NotRepeating("the shorter model lacks a context")
        own = {
            layer: position
            for position, layer in enumerate(self._kept)
            if short[position] == whole[layer]
        }
        return [own.get(layer, by_context[whole[layer]]) for layer in range(self._total)]

    # ------------------------------------------------------------ writing the whole

    def run(self) -> TraceResult:
        """The trace of all layers."""
        parts = parts_of(self._old, self._paths)
        for number, part in enumerate(parts):
            if isinstance(part, Sweep):
                self._note_homes(number, part)
        for number, part in enumerate(parts):
            if isinstance(part, Sweep):
                self._write_sweep(number, part)
            else:
                self._write_outside(part)
        self._check()
        return dataclasses.replace(
            self._old,
            records=self._records,
            events=self._events,
            marks={
                name: self._moved[index]
                for name, index in self._old.marks.items()
                if index in self._moved
            },
            num_layers_written=self._old.num_layers_written + self._total - len(self._kept),
            _cache={},
        )

    def _note_homes(self, number: int, sweep: Sweep) -> None:
        shapes: dict[int, list[tuple[bool, int]]] = {}
        for chunk in sweep.chunks:
            births = 0
            shape = shapes[chunk.layer] = []
            for index in chunk.events:
                event = self._old.events[index]
                shape.append(
                    (event.is_allocation, self._old.records[event.storage_id].requested_bytes)
                )
                if event.is_allocation:
                    self._home[event.storage_id] = (number, chunk.layer, births)
                    births += 1
        for position, twin in self._twins:
            if shapes.get(position) != shapes.get(twin):
                event = self._old.events[sweep.chunks[0].events[0]]
                raise NotRepeating(
                    f"layers {position} and {twin}, alike in kind, differ around {event.op}"
                    f" ({event.phase.value})"
                )

    def _write_sweep(self, number: int, sweep: Sweep) -> None:
        by_layer = {chunk.layer: chunk for chunk in sweep.chunks}
        order = range(self._total - 1, -1, -1) if sweep.is_descending else range(self._total)
        for layer in order:
            chunk = by_layer.get(self._sample_of[layer])
            if chunk is not None:
                self._write_chunk(number, chunk, layer)

    def _write_chunk(self, number: int, chunk: Chunk, layer: int) -> None:
        sample, births = chunk.layer, 0
        is_own = self._is_own(sample, layer)
        for index in chunk.events:
            event = self._old.events[index]
            if event.is_allocation:
                record = self._copy(self._old.records[event.storage_id], sample, layer)
                self._born[number, layer, births] = record.storage_id
                births += 1
                self._append(event, record, sample, layer)
            else:
                record = self._records[self._target(event.storage_id, sample, layer, is_own)]
                self._bury(event, record, self._old.records[event.storage_id], sample, layer)
            if is_own:
                self._moved[index] = len(self._events) - 1

    def _resize(self, record: StorageRecord) -> None:
        """Clipping holds one number a gradient, and one a gradient and chunk inside the norm: as
        many as the whole has."""
        if not self._num_gradients:
            self._num_gradients = self._count_gradients()
        for short, whole in self._num_gradients.items():
            per_gradient = record.shape == (short,) and record.name != FOREACH_NORM_PARTIALS
            if per_gradient or (
                record.name == FOREACH_NORM_PARTIALS and record.requested_bytes % short == 0
            ):
                record.requested_bytes = record.requested_bytes // short * whole
                record.shape = (record.shape[0] // short * whole,)
                return

    def _count_gradients(self) -> dict[int, int]:
        """Number of gradients in the short trace -> in the whole, of all and of each type, written
        so far."""
        counts: dict[int, int] = {}
        for dtype in (
            None,
            *sorted({r.dtype for r in self._old.records if r.role is StorageRole.GRADIENTS}),
        ):
            short, whole = (
                sum(
                    r.role is StorageRole.GRADIENTS and r.step == 0 and dtype in (None, r.dtype)
                    for r in records
                )
                for records in (self._old.records, self._records)
            )
            counts.setdefault(short, whole)
        return counts

    def _is_own(self, sample: int, layer: int) -> bool:
        return self._kept[sample] == layer

    def _target(self, storage_id: int, sample: int, layer: int, is_own: bool) -> int:
        """The whole's record that a layer frees where its sample frees ``storage_id``."""
        op = self._old.records[storage_id].op
        home = self._home.get(storage_id)
        if home is None:
            if not is_own:
                raise NotRepeating(f"every layer would free {op} made outside the layers")
            return self._outside[storage_id]
        number, owner, birth = home
        source = layer + owner - sample
        # from one end of the stack to the other, such as a gradient summed over all layers
        if abs(owner - sample) > WINDOW:
            if not is_own or not self._is_own_sample(owner):
                raise NotRepeating(f"layer {layer} frees {op} of a layer far away")
            source = self._kept[owner]
        found = self._born.get((number, source, birth))
        if found is None:
            raise NotRepeating(f"layer {layer} frees {op} of a layer that has none")
        return found

    def _write_outside(self, index: int) -> None:
        event = self._old.events[index]
        old = self._old.records[event.storage_id]
        if event.is_allocation:
            record = self._copy(old, 0, 0)
            if event.phase is TracePhase.CLIP:
                self._resize(record)
            self._outside[event.storage_id] = record.storage_id
            self._append(event, record, 0, 0)
        else:
            target = self._freed_outside(event.storage_id)
            if target is None:
                raise NotRepeating(f"{old.op} is freed outside the layers, for one of many")
            self._bury(event, self._records[target], old, 0, 0)
        self._moved[index] = len(self._events) - 1

    def _freed_outside(self, storage_id: int) -> int | None:
        """The whole's record that is freed outside the layers where the short trace frees
        ``storage_id``; None where it would be one of several."""
        home = self._home.get(storage_id)
        if home is None:
            return self._outside.get(storage_id)
        number, owner, birth = home
        if not self._is_own_sample(owner):
            return None
        return self._born.get((number, self._kept[owner], birth))

    def _is_own_sample(self, position: int) -> bool:
        """Whether the kept layer at ``position`` is written out of its own events."""
        return self._sample_of[self._kept[position]] == position

    def _renamed(self, path: str, sample: int, layer: int) -> str:
        return self._paths.moved(path, layer - sample)

    def _copy(self, old: StorageRecord, sample: int, layer: int) -> StorageRecord:
        record = StorageRecord(*_VALUES(old))
        record.storage_id, record.born = len(self._records), len(self._events)
        record.died = record.died_phase = record.died_scope = None
        record.module, record.name = (
            self._renamed(old.module, sample, layer),
            self._renamed(old.name, sample, layer),
        )
        record.owner = self._renamed(old.owner, sample, layer)
        self._records.append(record)
        return record

    def _append(self, event: StorageEvent, record: StorageRecord, sample: int, layer: int) -> None:
        module = self._renamed(event.module, sample, layer)
        self._events.append(
            StorageEvent(
                event.is_allocation,
                record.storage_id,
                event.phase,
                module,
                event.op,
                event.step,
                event.micro_step,
            )
        )

    def _bury(
        self,
        event: StorageEvent,
        record: StorageRecord,
        old: StorageRecord,
        sample: int,
        layer: int,
    ) -> None:
        if record.died is not None:
            raise NotRepeating(f"{record.op} of {record.module} would be freed twice")
        record.died, record.died_phase, record.died_op = (
            len(self._events),
            old.died_phase,
            old.died_op,
        )
        record.died_scope = old.died_scope
        record.died_module = self._renamed(old.died_module, sample, layer)
        self._append(event, record, sample, layer)

    def _check(self) -> None:
        """What is alive at the end must be what the short trace left, layer by layer."""
        left = sum(record.died is None for record in self._records)
        homes = self._home
        expected = 0
        for old in self._old.records:
            if old.died is None:
                home = homes.get(old.storage_id)
                expected += (
                    1 if home is None else sum(sample == home[1] for sample in self._sample_of)
                )
        if left != expected:
            raise NotRepeating(f"{left} storages would remain, not {expected}")
