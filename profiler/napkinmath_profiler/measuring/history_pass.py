"""Steps under the allocator's recorded history, and the history read back as the record that a
trace gives."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from napkinmath_profiler.measuring.device_memory import BlockEvent, DeviceMemory
from napkinmath_profiler.measuring.history_marks import Claim, HistoryMarks, Place
from napkinmath_profiler.measuring.measured_loop import MeasuredLoop
from napkinmath_profiler.tracing.attribution import attribute
from napkinmath_profiler.tracing.observation import installed_versions
from napkinmath_profiler.tracing.step_phases import output_head
from napkinmath_profiler.tracing.storage_events import (
    StorageEvent,
    StorageRecord,
    StorageRole,
    TracePhase,
)
from napkinmath_profiler.tracing.trace_result import TraceResult

LIBRARY_WORKSPACE = "kept by a library (cuBLAS, cuDNN)"
BEFORE = "allocated before the steps"
NOWHERE = Place(0, TracePhase.SETUP, "", 0, 0, 0, False)
LIBRARY_FOLDERS = ("/torch/", "<frozen")


class HistoryPass:
    """Runs a loop's steps under history; ``result`` is what was recorded, also of steps that ran
    out of memory."""

    def __init__(
        self,
        model: nn.Module,
        loop: MeasuredLoop,
        inputs: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        memory: DeviceMemory,
        *,
        foreign_bytes: int = 0,
    ) -> None:
        """``foreign_bytes`` were allocated before the model was built, and are no part of what is
        measured."""
        self._foreign_bytes = foreign_bytes
        self._model, self._loop, self._inputs = model, loop, inputs
        self._optimizer, self._memory = optimizer, memory
        self._marks = HistoryMarks(model, memory)
        self._events: list[BlockEvent] = []
        self._allocated_before = 0
        self._seconds = 0.0

    def run(self, num_steps: int, *, stacks: bool = False) -> None:
        """Run the steps; what they raise is passed on, with the history kept."""
        marks, memory = self._marks, self._memory
        memory.synchronize()
        self._allocated_before = memory.figures().allocated - self._foreign_bytes
        marks.mark_present(self._inputs, self._optimizer)
        self._loop.listeners.append(marks.phase_begins)
        started = time.perf_counter()
        try:
            with memory.history(stacks=stacks) as self._events, marks.listening():
                self._loop.timed_steps(num_steps)
        finally:
            self._seconds = time.perf_counter() - started
            self._loop.listeners.remove(marks.phase_begins)

    def present_in(self, result: TraceResult) -> dict[int, StorageRecord]:
        """By address, the storages of ``result`` that were there before the recording."""
        named = {
            record.name: record for record in result.records if record.phase is TracePhase.SETUP
        }
        return {
            claim.address: named[claim.name]
            for claim in self._marks.claims
            if claim.position == 0 and claim.name in named
        }

    @property
    def result(self) -> TraceResult:
        """The history as records and events, each attributed."""
        head = output_head(self._model)
        head_path = next(
            (path for path, module in self._model.named_modules() if module is head), None
        )
        return read_history(
            self._events,
            self._marks.places,
            self._marks.claims,
            self._marks.saved,
            allocated_before=self._allocated_before,
            head_module=head_path,
            device_type=self._memory.kind,
            seconds=self._seconds,
            first_position=self._memory.num_dropped,
        )


def read_history(
    events: Sequence[BlockEvent],
    places: Sequence[Place],
    claims: Sequence[Claim],
    saved: Sequence[tuple[int, int]] = (),
    *,
    allocated_before: int = 0,
    head_module: str | None = None,
    device_type: str = "cuda",
    seconds: float = 0.0,
    first_position: int = 0,
) -> TraceResult:
    """Join the allocator's events with what was noted beside them.

    ``claims`` at position 0 are what was there before the first event; of ``allocated_before``
    bytes what no claim names comes as one storage of its own. ``first_position`` is the number of
    events that were dropped before the first one here.
    """
    reader = _Reader(places)
    reader.place_present([claim for claim in claims if claim.position == 0], allocated_before)
    for position, event in enumerate(events, first_position):
        reader.take(position, event)
    reader.claim(claims)
    reader.note_saved(saved)
    reader.settle_leftovers()
    attribute(reader.records, head_module)
    return TraceResult(
        records=reader.records,
        events=reader.events,
        num_ops=0,
        seconds=seconds,
        marks=reader.step_marks(),
        versions=installed_versions(),
        device_type=device_type,
    )


class _Reader:
    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._next = 0
        self._here = NOWHERE
        self._live: dict[int, StorageRecord] = {}
        # address -> (position of birth in the history, record): who held an address when
        self._lives: dict[int, list[tuple[int, StorageRecord]]] = defaultdict(list)
        self._deaths: dict[int, int] = {}
        self.records: list[StorageRecord] = []
        self.events: list[StorageEvent] = []

    def place_present(self, claims: Sequence[Claim], allocated_before: int) -> None:
        """Births of what was there before."""
        for claim in claims:
            if claim.address not in self._live:
                record = self._born(-1, BlockEvent(True, claim.address, claim.nbytes, []))
                record.role, record.name = claim.role, claim.name
        known = sum(record.rounded_bytes for record in self.records)
        if allocated_before > known:
            record = self._born(-1, BlockEvent(True, 0, allocated_before - known, []))
            record.name = BEFORE
            record.role = StorageRole.UNATTRIBUTED

    def take(self, position: int, event: BlockEvent) -> None:
        """The next event of the history."""
        while self._next < len(self._places) and self._places[self._next].position <= position:
            self._here = self._places[self._next]
            self._next += 1
        if event.is_allocation:
            if event.address in self._live:  # its return was not recorded
                self._died(position, event.address)
            self._born(position, event)
        else:
            self._died(position, event.address)

    def _born(self, position: int, event: BlockEvent) -> StorageRecord:
        here = self._here
        record = StorageRecord(
            storage_id=len(self.records),
            requested_bytes=event.nbytes,
            shape=(),
            dtype="",
            op=_label(event.frames),
            module=here.module,
            phase=here.phase,
            step=here.step,
            micro_step=here.micro_step,
            born=len(self.events),
            scope=here.scope,
            of_loss=here.of_loss,
        )
        self.records.append(record)
        self._live[event.address] = record
        self._lives[event.address].append((position, record))
        self._note(True, record)
        return record

    def _died(self, position: int, address: int) -> None:
        record = self._live.pop(address, None)
        if record is None:  # was there before, unknown to anyone: part of what BEFORE sums up
            return
        here = self._here
        record.died, record.died_phase, record.died_scope, record.died_module = (
            len(self.events),
            here.phase,
            here.scope,
            here.module,
        )
        self._deaths[record.storage_id] = position
        self._note(False, record)

    def _note(self, is_allocation: bool, record: StorageRecord) -> None:
        here = self._here
        self.events.append(
            StorageEvent(
                is_allocation,
                record.storage_id,
                here.phase,
                here.module,
                record.op,
                here.step,
                here.micro_step,
            )
        )

    def _holder(self, position: int, address: int) -> StorageRecord | None:
        """Who held ``address`` after the first ``position`` events."""
        lives = self._lives.get(address, [])
        index = bisect_right(lives, position - 1, key=lambda life: life[0]) - 1
        if index < 0:
            return None
        record = lives[index][1]
        return record if self._deaths.get(record.storage_id, position) >= position else None

    def claim(self, claims: Sequence[Claim]) -> None:
        """Give roles and names; the first claim stands."""
        for claim in claims:
            record = self._holder(claim.position, claim.address)
            if record is not None and record.role is None:
                record.role, record.name, record.owner = claim.role, claim.name, claim.name

    def note_saved(self, saved: Sequence[tuple[int, int]]) -> None:
        """What autograd was seen to keep in a forward is an activation, however short it lived."""
        for position, address in saved:
            record = self._holder(position, address)
            if record is not None and record.role is None and record.phase is TracePhase.FORWARD:
                record.role = StorageRole.SAVED_ACTIVATIONS

    def settle_leftovers(self) -> None:
        """What nobody claims and what is still there after a later step is a library's."""
        last = max((event.step for event in self.events), default=0)
        for record in self.records:
            if (
                record.role in (None, StorageRole.SAVED_ACTIVATIONS)
                and record.died is None
                and record.step < last
            ):
                record.role, record.name = StorageRole.WORKSPACE, LIBRARY_WORKSPACE

    def step_marks(self) -> dict[str, int]:
        """The last event before each backward and after each step, as a trace marks them."""
        marks: dict[str, int] = {}
        previous: StorageEvent | None = None
        for index, event in enumerate(self.events):
            if previous is not None and previous.phase is not event.phase:
                if event.phase in (
                    TracePhase.BACKWARD,
                    TracePhase.RECOMPUTE,
                ) and previous.phase in (TracePhase.FORWARD, TracePhase.LOSS):
                    marks[f"forward_end:{event.step}:{event.micro_step}"] = index - 1
                elif event.phase is TracePhase.ZERO_GRAD:
                    marks[f"step_end:{event.step}"] = index - 1
            previous = event
        return marks


def _label(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line outside PyTorch, where a stack was recorded."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file and not any(mark in file for mark in LIBRARY_FOLDERS):
            return f"{file.rpartition('/')[2]}:{frame.get('line', 0)} {frame.get('name', '')}"
    return ""
