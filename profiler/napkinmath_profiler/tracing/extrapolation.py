"""Write out the events of a whole model from those of a shorter one that has every kind of layer in
every surrounding.

In every phase the layers take turns: up in the forward, down in the backward, up again in each
multi-tensor operation of the optimizer. One such turn is a *sweep*, one layer's part of it a
*chunk*. A missing layer's chunk is a copy of the chunk of a layer in the same context, in which
every storage of a layer ``d`` places away becomes that of the layer ``d`` places away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

from napkinmath_profiler.tracing.kernel_workspaces import FOREACH_NORM_PARTIALS
from napkinmath_profiler.tracing.layer_stacks import WINDOW, LayerStack, contexts
from napkinmath_profiler.tracing.storage_events import (
    StorageEvent,
    StorageRecord,
    StorageRole,
    TracePhase,
)
from napkinmath_profiler.tracing.trace_result import TraceResult


class NotRepeating(Exception):
    """The events do not repeat as extrapolation needs; the whole model must be traced."""


@dataclass(slots=True)
class _Chunk:
    layer: int
    events: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sweep:
    chunks: list[_Chunk]

    @property
    def is_descending(self) -> bool:
        return len(self.chunks) > 1 and self.chunks[1].layer < self.chunks[0].layer


_Part = _Sweep | int  # a sweep, or the index of an event outside any
_UNSEEN = object()
_VALUES = attrgetter(*(entry.name for entry in fields(StorageRecord)))
TURNS: dict[TracePhase, int] = {
    TracePhase.FORWARD: 1,
    TracePhase.LOSS: 1,
    TracePhase.BACKWARD: 2,
    TracePhase.RECOMPUTE: 2,
    TracePhase.CLIP: 3,
    TracePhase.OPTIMIZER: 4,
    TracePhase.ZERO_GRAD: 5,
    TracePhase.BETWEEN: 5,
}


def extrapolated(result: TraceResult, stack: LayerStack, kept: Sequence[int]) -> TraceResult:
    """``result``, traced with only the ``kept`` layers of ``stack``, as the trace of all of them;
    raises NotRepeating."""
    return _Extrapolation(result, stack, kept).run()


def _turn(event: StorageEvent) -> tuple[object, ...]:
    """Events of different turns are never of one sweep; a multi-tensor operation allocates, and
    frees, all layers in one."""
    turn = (TURNS.get(event.phase, 0), event.step, event.micro_step)
    if event.phase in (TracePhase.CLIP, TracePhase.OPTIMIZER) and (
        "_foreach" in event.op or "_fused" in event.op
    ):
        return (*turn, event.op, event.is_allocation)
    return turn


class _Extrapolation:
    def __init__(self, result: TraceResult, stack: LayerStack, kept: Sequence[int]) -> None:
        self._old, self._stack, self._kept = result, stack, list(kept)
        self._prefix = f"{stack.path}."
        self._total = len(stack.kinds)
        self._number_cache: dict[str, object] = {}
        self._renames: dict[
            tuple[str, int], str
        ] = {}  # path and how many layers further -> the path there
        self._twins: list[
            tuple[int, int]
        ] = []  # kept positions in equal contexts, whose events must be alike
        self._sample_of = self._samples()
        self._records: list[StorageRecord] = []
        self._events: list[StorageEvent] = []
        self._moved: dict[
            int, int
        ] = {}  # event index: short -> whole, for events outside and of kept layers
        self._born: dict[tuple[int, int, int], int] = {}  # (sweep, layer, birth in chunk) -> record
        self._outside: dict[int, int] = {}  # record outside any sweep: short -> whole
        self._num_gradients: dict[int, int] = {}
        self._home: dict[
            int, tuple[int, int, int]
        ] = {}  # short record -> (sweep, kept position, birth in chunk)

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

    # ------------------------------------------------------------ cutting the short trace into sweeps

    def _number_at(self, path: str) -> tuple[int, int] | None:
        """Where in ``path`` the layer's number stands, and where it ends; wrappers such as PEFT's
        may stand before the stack."""
        start = 0 if path.startswith(self._prefix) else path.find(f".{self._prefix}") + 1
        if start == 0 and not path.startswith(self._prefix):
            return None
        begin = start + len(self._prefix)
        end = path.find(".", begin)
        end = len(path) if end < 0 else end
        return (begin, end) if path[begin:end].isdigit() else None

    def _layer_in(self, path: str) -> int | None:
        found = self._number_cache.get(path, _UNSEEN)
        if found is _UNSEEN:
            at = self._number_at(path)
            found = self._number_cache[path] = None if at is None else int(path[at[0] : at[1]])
        return found  # type: ignore[return-value]

    def _layer_of(self, event: StorageEvent) -> int | None:
        layer = self._layer_in(event.module)
        if layer is not None:
            return layer
        record = self._old.records[event.storage_id]
        if not event.is_allocation and event.phase in (TracePhase.FORWARD, TracePhase.LOSS):
            return self._layer_in(
                record.owner or record.module
            )  # autocast's cache of cast weights goes at its exit
        return None if event.module else self._layer_in(record.owner)

    def _parts(self) -> list[_Part]:
        parts: list[_Part] = []
        sweep: list[_Chunk] = []
        waiting: list[
            int
        ] = []  # events outside layers since the last chunk: its tail, if the sweep goes on
        turn: tuple[object, ...] = ()

        def close() -> None:
            if sweep:
                parts.append(_Sweep(list(sweep)))
                sweep.clear()
            parts.extend(waiting)
            waiting.clear()

        for index, event in enumerate(self._old.events):
            if (now := _turn(event)) != turn:
                close()
                turn = now
            layer = self._layer_of(event)
            if layer is None:
                waiting.append(index)
                continue
            if sweep and layer == sweep[-1].layer:
                sweep[-1].events += [*waiting, index]
                waiting.clear()
            elif sweep and self._continues(sweep, layer):
                sweep[-1].events += waiting
                waiting.clear()
                sweep.append(_Chunk(layer, [index]))
            else:
                close()
                sweep.append(_Chunk(layer, [index]))
        close()
        return parts

    def _continues(self, sweep: list[_Chunk], layer: int) -> bool:
        return len(sweep) == 1 or (layer > sweep[-1].layer) == (sweep[-1].layer > sweep[-2].layer)

    # ------------------------------------------------------------ writing the whole

    def run(self) -> TraceResult:
        parts = self._parts()
        for number, part in enumerate(parts):
            if isinstance(part, _Sweep):
                self._note_homes(number, part)
        for number, part in enumerate(parts):
            if isinstance(part, _Sweep):
                self._write_sweep(number, part)
            else:
                self._write_outside(part)
        self._check()
        old = self._old
        return TraceResult(
            records=self._records,
            events=self._events,
            num_ops=old.num_ops,
            seconds=old.seconds,
            choices=old.choices,
            attention=old.attention,
            marks={
                name: self._moved[index]
                for name, index in old.marks.items()
                if index in self._moved
            },
            versions=old.versions,
            device_type=old.device_type,
            num_layers_written=old.num_layers_written + self._total - len(self._kept),
        )

    def _note_homes(self, number: int, sweep: _Sweep) -> None:
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

    def _write_sweep(self, number: int, sweep: _Sweep) -> None:
        by_layer = {chunk.layer: chunk for chunk in sweep.chunks}
        order = range(self._total - 1, -1, -1) if sweep.is_descending else range(self._total)
        for layer in order:
            chunk = by_layer.get(self._sample_of[layer])
            if chunk is not None:
                self._write_chunk(number, chunk, layer)

    def _write_chunk(self, number: int, chunk: _Chunk, layer: int) -> None:
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
        home = self._home.get(storage_id)
        if home is None:
            if not is_own:
                raise NotRepeating(
                    f"every layer would free {self._old.records[storage_id].op} made outside the"
                    " layers"
                )
            return self._outside[storage_id]
        number, owner, birth = home
        source = layer + owner - sample
        if (
            abs(owner - sample) > WINDOW
        ):  # from one end of the stack to the other, such as a gradient summed over all layers
            if not is_own or self._sample_of[self._kept[owner]] != owner:
                raise NotRepeating(
                    f"layer {layer} frees {self._old.records[storage_id].op} of a layer far away"
                )
            source = self._kept[owner]
        found = self._born.get((number, source, birth))
        if found is None:
            raise NotRepeating(
                f"layer {layer} frees {self._old.records[storage_id].op} of a layer that has none"
            )
        return found

    def _write_outside(self, index: int) -> None:
        event = self._old.events[index]
        if event.is_allocation:
            record = self._copy(self._old.records[event.storage_id], 0, 0)
            if event.phase is TracePhase.CLIP:
                self._resize(record)
            self._outside[event.storage_id] = record.storage_id
            self._append(event, record, 0, 0)
        else:
            home = self._home.get(event.storage_id)
            target = (
                self._outside.get(event.storage_id)
                if home is None
                else self._born.get((home[0], self._kept[home[1]], home[2]))
            )
            if target is None or (
                home is not None and self._sample_of[self._kept[home[1]]] != home[1]
            ):
                raise NotRepeating(
                    f"{self._old.records[event.storage_id].op} is freed outside the layers, for one"
                    " of many"
                )
            self._bury(event, self._records[target], self._old.records[event.storage_id], 0, 0)
        self._moved[index] = len(self._events) - 1

    def _renamed(self, path: str, sample: int, layer: int) -> str:
        if sample == layer or not path:
            return path
        found = self._renames.get((path, layer - sample))
        if found is None:
            at = self._number_at(path)
            found = (
                path
                if at is None
                else f"{path[: at[0]]}{int(path[at[0] : at[1]]) + layer - sample}{path[at[1] :]}"
            )
            self._renames[path, layer - sample] = found
        return found

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
