"""A recorded run cut into stretches: outside the layers, and within each of them, phase by phase,
in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.ir.ledger import Phase

from napkinmath_profiler.tracing.storage_events import StorageEvent, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import PHASES

# Clipping makes a list with a number a gradient, which grows with the layers in steps of less than
# what an allocation is rounded to: it is taken as asked for, and the sum is rounded once the number
# of layers is known.
SCALAR_BYTES = 8


@dataclass(slots=True)
class Bytes:
    """Live bytes over a stretch, from its start: the change at its end and the highest point."""

    net: int = 0
    high: int = 0

    def take(self, nbytes: int) -> None:
        """An event: so many bytes more, or fewer."""
        self.net += nbytes
        self.high = max(self.high, self.net)

    def then(self, other: Bytes) -> None:
        """Another stretch follows as part of this one."""
        self.high = max(self.high, self.net + other.high)
        self.net += other.net


@dataclass(slots=True)
class StretchPiece:
    """A stretch outside the layers, or a sweep over layers in the order visited."""

    step: int
    phase: Phase
    outside: Bytes | None = None
    layers: list[tuple[int, Bytes]] = field(default_factory=list[tuple[int, Bytes]])

    @property
    def descending(self) -> bool:
        """Whether the sweep goes from the last layer to the first."""
        return len(self.layers) > 1 and self.layers[1][0] < self.layers[0][0]


@dataclass(slots=True)
class CutRun:
    """Bytes before the first step, and the pieces of the steps."""

    base: int
    pieces: list[StretchPiece]


def cut(result: TraceResult, stack_path: str) -> CutRun:
    """The pieces of a recorded run of a model whose layers are at ``stack_path``."""
    reader = _Cutter(result, stack_path)
    for event in result.events:
        if event.phase is TracePhase.SETUP:
            reader.base += reader.size(event)
        else:
            reader.take(event)
    reader.close()
    return CutRun(reader.base, reader.pieces)


class _Cutter:
    def __init__(self, result: TraceResult, stack_path: str) -> None:
        self._result, self._prefix = result, f"{stack_path}."
        self._numbers: dict[str, int | None] = {}
        self._turn: tuple[int, int, Phase] | None = None
        self._sweep: list[tuple[int, Bytes]] = []
        self._waiting: Bytes | None = None
        self.base = 0
        self.pieces: list[StretchPiece] = []

    def size(self, event: StorageEvent) -> int:
        record = self._result.records[event.storage_id]
        size = record.requested_bytes if self._is_list(event) else record.rounded_bytes
        return size if event.is_allocation else -size

    def _is_list(self, event: StorageEvent) -> bool:
        nbytes = self._result.records[event.storage_id].requested_bytes
        return (
            event.phase is TracePhase.CLIP
            and nbytes > SCALAR_BYTES
            and nbytes % ALLOCATION_GRANULE > 0
        )

    def take(self, event: StorageEvent) -> None:
        turn = (event.step, event.micro_step, PHASES[event.phase])
        if turn != self._turn:
            self.close()
            self._turn = turn
        layer = None if self._is_list(event) else self._layer_of(event)
        if layer is None:
            if self._is_list(event) and self._sweep:
                self.close()
            if self._waiting is None:
                self._waiting = Bytes()
            self._waiting.take(self.size(event))
            return
        self._turn_to(layer)
        self._sweep[-1][1].take(self.size(event))

    def _turn_to(self, layer: int) -> None:
        """The sweep goes on with this layer, or a new one begins."""
        if self._sweep and (layer == self._sweep[-1][0] or self._continues(layer)):
            if self._waiting is not None:
                self._sweep[-1][1].then(self._waiting)
                self._waiting = None
            if layer != self._sweep[-1][0]:
                self._sweep.append((layer, Bytes()))
        else:
            self.close()
            self._sweep.append((layer, Bytes()))

    def close(self) -> None:
        """The sweep is over; what came after its last layer stands outside."""
        if self._turn is None:
            return
        step, _, phase = self._turn
        if self._sweep:
            self.pieces.append(StretchPiece(step, phase, layers=self._sweep))
            self._sweep = []
        if self._waiting is not None:
            self.pieces.append(StretchPiece(step, phase, outside=self._waiting))
            self._waiting = None

    def _continues(self, layer: int) -> bool:
        last = self._sweep[-1][0]
        return len(self._sweep) == 1 or (layer > last) == (last > self._sweep[-2][0])

    def _layer_of(self, event: StorageEvent) -> int | None:
        layer = self._number(event.module)
        if layer is not None:
            return layer
        return None if event.module else self._number(self._result.records[event.storage_id].owner)

    def _number(self, path: str) -> int | None:
        if path not in self._numbers:
            at = path.find(self._prefix)
            digits = (
                path[at + len(self._prefix) :].partition(".")[0]
                if at == 0 or (at > 0 and path[at - 1] == ".")
                else ""
            )
            self._numbers[path] = int(digits) if digits.isdecimal() else None
        return self._numbers[path]


def merged(pieces: Sequence[StretchPiece]) -> list[StretchPiece]:
    """Pieces with neighbouring outside stretches of one phase joined, so that runs of different
    depth can be laid side by side."""
    found: list[StretchPiece] = []
    for piece in pieces:
        before = found[-1] if found else None
        if (
            before is not None
            and before.outside is not None
            and piece.outside is not None
            and (before.step, before.phase) == (piece.step, piece.phase)
        ):
            before.outside.then(piece.outside)
        else:
            found.append(piece)
    return found
