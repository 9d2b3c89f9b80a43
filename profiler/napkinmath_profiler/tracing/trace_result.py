"""What a trace found: a list of events and storages, and every figure read off them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from napkinmath_profiler.tracing.storage_events import (
    PERSISTENT_ROLES,
    StorageEvent,
    StorageRecord,
    StorageRole,
    TracePhase,
)


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The moment of most requested bytes: how many, which event, and what ran."""

    requested_bytes: int
    event_index: int
    phase: TracePhase
    module: str
    op: str
    step: int
    micro_step: int


@dataclass(slots=True)
class _Curves:
    peak: PeakMoment | None
    peak_by_phase: dict[tuple[int, TracePhase], PeakMoment]


@dataclass  # no slots: weak references to it need Python 3.11's weakref_slot
class TraceResult:
    """The record of traced steps; requested bytes are each rounded up to 512."""

    records: list[StorageRecord]
    events: list[StorageEvent]
    num_ops: int
    seconds: float
    choices: dict[str, int] = field(default_factory=dict[str, int])
    attention: dict[str, int] = field(default_factory=dict[str, int])
    marks: dict[str, int] = field(default_factory=dict[str, int])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    device_type: str = "meta"
    num_layers_written: int = 0
    """Layers that were not traced but written out from like ones."""
    _cache: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def _curves(self) -> _Curves:
        if "curves" not in self._cache:
            self._cache["curves"] = self._follow()
        return self._cache["curves"]

    def _follow(self) -> _Curves:
        live = 0
        peak: PeakMoment | None = None
        by_phase: dict[tuple[int, TracePhase], PeakMoment] = {}
        for index, event in enumerate(self.events):
            size = self.records[event.storage_id].rounded_bytes
            live += size if event.is_allocation else -size
            best = by_phase.get((event.step, event.phase))
            if best is None or live > best.requested_bytes:
                moment = PeakMoment(
                    live, index, event.phase, event.module, event.op, event.step, event.micro_step
                )
                by_phase[event.step, event.phase] = moment
                if peak is None or live > peak.requested_bytes:
                    peak = moment
        return _Curves(peak, by_phase)

    @property
    def peak(self) -> PeakMoment:
        """The peak over the whole trace."""
        peak = self._curves().peak
        if peak is None:
            raise ValueError("the trace has no events")
        return peak

    @property
    def peak_bytes(self) -> int:
        """Requested bytes at the peak."""
        return self.peak.requested_bytes

    def peak_by_phase(self, step: int | None = None) -> dict[TracePhase, PeakMoment]:
        """The peak of each phase of one step, or the highest over all steps."""
        best: dict[TracePhase, PeakMoment] = {}
        for (at_step, phase), moment in self._curves().peak_by_phase.items():
            if step is not None and at_step != step:
                continue
            if phase not in best or moment.requested_bytes > best[phase].requested_bytes:
                best[phase] = moment
        return best

    def live_at(self, event_index: int) -> list[StorageRecord]:
        """The storages alive right after event ``event_index``, in order of birth."""
        return [
            r
            for r in self.records
            if r.born <= event_index and (r.died is None or r.died > event_index)
        ]

    def bytes_by_role(self, event_index: int) -> dict[StorageRole, int]:
        """Live requested bytes by role right after event ``event_index``; they sum to what is
        alive then."""
        totals: dict[StorageRole, int] = defaultdict(int)
        for record in self.live_at(event_index):
            totals[record.role or StorageRole.UNATTRIBUTED] += record.rounded_bytes
        return dict(totals)

    def saved_records(self, step: int = 0) -> list[StorageRecord]:
        """Storages born in the forward or the loss of ``step`` and alive when its (first) forward
        had ended."""
        end = self.marks[f"forward_end:{step}:0"]
        kept_anyway = PERSISTENT_ROLES | {StorageRole.WORKSPACE}
        return [
            r
            for r in self.live_at(end)
            if r.phase in (TracePhase.FORWARD, TracePhase.LOSS) and r.role not in kept_anyway
        ]

    @property
    def saved_bytes(self) -> int:
        """Requested bytes made by the first forward and loss that are alive at the start of
        backward."""
        return sum(r.rounded_bytes for r in self.saved_records())

    def persistent_bytes(self) -> dict[StorageRole, int]:
        """Largest live bytes of each persistent role at any time (gradients: when all are
        there)."""
        live: dict[StorageRole, int] = defaultdict(int)
        best: dict[StorageRole, int] = defaultdict(int)
        for event in self.events:
            record = self.records[event.storage_id]
            if (role := record.role) is not None and role in PERSISTENT_ROLES:
                live[role] += record.rounded_bytes if event.is_allocation else -record.rounded_bytes
                best[role] = max(best[role], live[role])
        return dict(best)

    def grouped_at(
        self, event_index: int
    ) -> list[tuple[tuple[str, str, str, tuple[int, ...], str, str], int, int]]:
        """Live storages grouped by (role, module with layer numbers starred, op, shape, dtype,
        phase), with count and bytes."""
        groups: dict[tuple[str, str, str, tuple[int, ...], str, str], list[int]] = defaultdict(
            lambda: [0, 0]
        )
        for r in self.live_at(event_index):
            role = (r.role or StorageRole.UNATTRIBUTED).value
            key = (role, starred(r.name or r.module), r.op, r.shape, r.dtype, r.phase.value)
            groups[key][0] += 1
            groups[key][1] += r.rounded_bytes
        return sorted(((k, c, b) for k, (c, b) in groups.items()), key=lambda item: -item[2])


def starred(path: str) -> str:
    """``path`` with every purely numeric part replaced by a star."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
