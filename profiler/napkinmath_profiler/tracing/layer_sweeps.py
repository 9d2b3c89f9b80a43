"""Cut the events of a trace into sweeps: in every phase the layers take turns, up in the forward, down
in the backward, up again in each multi-tensor operation of the optimizer. One layer's part of a
sweep is a chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

from napkinmath_profiler.tracing.storage_events import StorageEvent, StorageRecord, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult

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
_UNSEEN = object()


@dataclass(slots=True)
class Chunk:
    """A layer's part of a sweep: its number, and the indices of its events."""

    layer: int
    events: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Sweep:
    """The chunks of layers that follow each other, up or down."""

    chunks: list[Chunk]

    @property
    def is_descending(self) -> bool:
        """Whether the last layer comes first."""
        return len(self.chunks) > 1 and self.chunks[1].layer < self.chunks[0].layer


Part = Sweep | int  # a sweep, or the index of an event outside any


class LayerPaths:
    """Module paths with the number of a layer in them, under the path of the layers' stack."""

    def __init__(self, stack: str) -> None:
        self._prefix = f"{stack}."
        self._numbers: dict[str, object] = {}
        # path and how many layers further -> the path there
        self._moved: dict[tuple[str, int], str] = {}

    def layer_in(self, path: str) -> int | None:
        """The layer that ``path`` lies in."""
        found = self._numbers.get(path, _UNSEEN)
        if found is _UNSEEN:
            at = self._number_at(path)
            found = self._numbers[path] = None if at is None else int(path[at[0] : at[1]])
        return found  # type: ignore[return-value]

    def moved(self, path: str, distance: int) -> str:
        """The same place ``distance`` layers further; a path outside the layers stays."""
        if distance == 0 or not path:
            return path
        found = self._moved.get((path, distance))
        if found is None:
            at = self._number_at(path)
            found = path
            if at is not None:
                number = int(path[at[0] : at[1]]) + distance
                found = f"{path[: at[0]]}{number}{path[at[1] :]}"
            self._moved[path, distance] = found
        return found

    def _number_at(self, path: str) -> tuple[int, int] | None:
        """Where in ``path`` the layer's number stands, and where it ends; wrappers such as PEFT's
        may stand before the stack."""
        start = 0 if path.startswith(self._prefix) else path.find(f".{self._prefix}") + 1
        if start == 0 and not path.startswith(self._prefix):
            return None
        begin = start + len(self._prefix)
        end = path.find(".", begin)
        end = len(path) if end < 0 else end
        return (begin, end) if path[begin:end].isdecimal() else None


def parts_of(result: TraceResult, paths: LayerPaths) -> list[Part]:
    """The sweeps of a trace and the events between them, in order."""
    cutter = _Cutter()
    turn: tuple[object, ...] = ()
    for index, event in enumerate(result.events):
        if (now := _turn(event)) != turn:
            cutter.close()
            turn = now
        cutter.take(index, _layer_of(event, result.records[event.storage_id], paths))
    cutter.close()
    return cutter.parts


class _Cutter:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._sweep: list[Chunk] = []
        # events outside layers since the last chunk: its tail, if the sweep goes on
        self._waiting: list[int] = []

    def close(self) -> None:
        """No sweep goes on beyond this."""
        if self._sweep:
            self.parts.append(Sweep(self._sweep))
            self._sweep = []
        self.parts.extend(self._waiting)
        self._waiting.clear()

    def take(self, index: int, layer: int | None) -> None:
        """An event of a layer, or of none."""
        if layer is None:
            self._waiting.append(index)
            return
        is_same = bool(self._sweep) and layer == self._sweep[-1].layer
        if is_same or self._continues(layer):
            self._sweep[-1].events += self._waiting
            self._waiting.clear()
        else:
            self.close()
        if is_same:
            self._sweep[-1].events.append(index)
        else:
            self._sweep.append(Chunk(layer, [index]))

    def _continues(self, layer: int) -> bool:
        if len(self._sweep) < 2:
            return bool(self._sweep)
        before, last = self._sweep[-2].layer, self._sweep[-1].layer
        return (layer > last) == (last > before)


def _turn(event: StorageEvent) -> tuple[object, ...]:
    """Events of different turns are never of one sweep; a multi-tensor operation allocates, and
    frees, all layers in one."""
    turn = (TURNS.get(event.phase, 0), event.step, event.micro_step)
    if event.phase in (TracePhase.CLIP, TracePhase.OPTIMIZER) and (
        "_foreach" in event.op or "_fused" in event.op
    ):
        return (*turn, event.op, event.is_allocation)
    return turn


def _layer_of(event: StorageEvent, record: StorageRecord, paths: LayerPaths) -> int | None:
    layer = paths.layer_in(event.module)
    if layer is not None:
        return layer
    if not event.is_allocation and event.phase in (TracePhase.FORWARD, TracePhase.LOSS):
        # autocast's cache of cast weights goes at its exit
        return paths.layer_in(record.owner or record.module)
    return None if event.module else paths.layer_in(record.owner)
