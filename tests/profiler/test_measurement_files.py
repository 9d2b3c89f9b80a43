"""What a measurement reads and writes on a GPU's machine, from recorded text and snapshots: labels,
stamps, kept histories."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from napkinmath.base.errors import InputError
from napkinmath.ir.timeline import Timeline
from napkinmath_profiler.measuring import environment
from napkinmath_profiler.measuring.device_memory import (
    BlockEvent,
    CpuMemory,
    CudaMemory,
    MemoryFigures,
    block_events,
)
from napkinmath_profiler.measuring.environment import (
    busy_notes,
    describe_environment,
    disturbance_notes,
    smi_values,
    spread_notes,
    throttling_notes,
)
from napkinmath_profiler.measuring.history_marks import Claim, Place
from napkinmath_profiler.measuring.history_pass import BEFORE, LIBRARY_WORKSPACE, read_history
from napkinmath_profiler.measuring.labelled_snapshot import label_snapshot, write_labelled
from napkinmath_profiler.measuring.measured_loop import TimeSpread
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.snapshot.read_snapshot import read_snapshot
from napkinmath_profiler.snapshot.write_snapshot import snapshot_of
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.storage_events import StorageRecord, StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def recorded() -> tuple[TraceResult, Timeline]:
    options = TraceOptions(
        dtype="fp32", micro_batch_size=2, sequence_length=16, optimizer="adamw-fused"
    )
    found = measure_step(
        CONFIG, options, MeasureOptions(device="cpu", num_steps=0, stand_in=CpuMemory())
    )
    assert found.result is not None and found.timeline is not None
    return found.result, found.timeline


def bare_snapshot(
    result: TraceResult, timeline: Timeline
) -> tuple[dict[str, Any], dict[int, StorageRecord]]:
    """What PyTorch would have recorded of those steps without stacks, and what was there before by
    address: that has no event."""
    snapshot = snapshot_of(timeline)
    before = [record for record in result.records if record.phase is TracePhase.SETUP]
    setup, present = len(before), {}
    trace, kept = [], 0
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            kept += 1
        if entry["action"] == "alloc" and kept <= setup:
            present[entry["addr"]] = before[kept - 1]
        else:
            trace.append({**entry, "frames": []})
    for segment in snapshot["segments"]:
        segment["blocks"] = [{**block, "frames": []} for block in segment["blocks"]]
    return {**snapshot, "device_traces": [trace]}, present


def test_labels_say_who_held_each_block(
    recorded: tuple[TraceResult, Timeline], tmp_path: Path
) -> None:
    result, timeline = recorded
    snapshot, present = bare_snapshot(result, timeline)
    write_labelled(snapshot, result, tmp_path / "s.pickle", present)
    with open(tmp_path / "s.pickle", "rb") as file:
        labelled = pickle.load(file)
    allocations = [e for e in labelled["device_traces"][0] if e["action"] == "alloc"]
    born = [r for r in result.records if r.phase is not TracePhase.SETUP]
    assert [e["size"] for e in allocations] == [r.requested_bytes for r in born]
    assert [e["frames"][0]["name"] for e in allocations if e["frames"]] == [
        r.name or r.op or r.phase.value for r in born
    ]
    read = read_snapshot(tmp_path / "s.pickle").timeline
    point, original = read.peak(), timeline.peak()
    assert point.nbytes == original.nbytes
    assert read.breakdown(point) == timeline.breakdown(original)
    with pytest.raises(InputError, match="exists"):
        write_labelled(snapshot, result, tmp_path / "s.pickle")


def test_pytorchs_own_viewer_reads_a_labelled_snapshot(
    recorded: tuple[TraceResult, Timeline],
) -> None:
    from torch.cuda import _memory_viz

    labelled = label_snapshot(bare_snapshot(*recorded)[0], recorded[0])
    assert "total_reserved" in _memory_viz.segsum(labelled)
    assert "alloc" in _memory_viz.trace(labelled)
    assert "<script" in _memory_viz.trace_plot(labelled)


def test_bookings_of_a_trace() -> None:
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 2 << 20, "stream": 0},
        {
            "action": "alloc",
            "addr": 0,
            "size": 100,
            "stream": 0,
            "frames": [{"name": "f", "filename": "a.py", "line": 1}],
        },
        {"action": "free_requested", "addr": 0, "size": 100, "stream": 0},
        {"action": "free_completed", "addr": 0, "size": 100, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
    ]
    assert [(e.is_allocation, e.nbytes) for e in block_events(trace)] == [(True, 100), (False, 100)]


def place(
    position: int, phase: TracePhase, module: str = "", step: int = 0, scope: int = 0
) -> Place:
    return Place(position, phase, module, step, 0, scope, False)


def born(address: int, nbytes: int) -> BlockEvent:
    return BlockEvent(True, address, nbytes, [])


def gone(address: int) -> BlockEvent:
    return BlockEvent(False, address, 0, [])


PLACES = [
    place(0, TracePhase.FORWARD, "layer", scope=1),
    place(3, TracePhase.BACKWARD, "layer", scope=2),
    place(5, TracePhase.OPTIMIZER, scope=3),
    place(6, TracePhase.FORWARD, "layer", step=1, scope=4),
]


def test_a_history_is_joined_with_what_was_noted() -> None:
    events = [
        born(1, 1000),
        born(2, 600),
        gone(2),
        born(2, 700),
        gone(1),
        born(3, 512),
        born(4, 2048),
        gone(4),
    ]
    claims = [
        Claim(0, 9, 4096, StorageRole.WEIGHTS, "w"),
        Claim(4, 2, 700, StorageRole.GRADIENTS, "w"),
        Claim(6, 3, 512, StorageRole.OPTIMIZER_STATES, "w.m"),
    ]
    result = read_history(events, PLACES, claims, allocated_before=4096 + 512)
    found = [(r.role, r.name, r.rounded_bytes, r.phase) for r in result.records]
    assert found == [
        (StorageRole.WEIGHTS, "w", 4096, TracePhase.SETUP),
        (StorageRole.UNATTRIBUTED, BEFORE, 512, TracePhase.SETUP),
        (StorageRole.SAVED_ACTIVATIONS, "", 1024, TracePhase.FORWARD),
        (StorageRole.TEMPORARIES, "", 1024, TracePhase.FORWARD),
        (StorageRole.GRADIENTS, "w", 1024, TracePhase.BACKWARD),
        (StorageRole.OPTIMIZER_STATES, "w.m", 512, TracePhase.OPTIMIZER),
        (StorageRole.TEMPORARIES, "", 2048, TracePhase.FORWARD),
    ]
    assert result.marks["forward_end:0:0"] == 4


def test_an_address_used_again_is_another_storage() -> None:
    events = [born(1, 512), gone(1), born(1, 512), born(2, 512)]
    result = read_history(
        events,
        PLACES,
        [
            Claim(1, 1, 512, StorageRole.GRADIENTS, "first"),
            Claim(4, 1, 512, StorageRole.GRADIENTS, "second"),
        ],
    )
    assert [r.name for r in result.records] == ["first", "second", ""]


def test_what_a_library_keeps_is_no_activation() -> None:
    events = [
        born(1, 1 << 20),
        born(2, 512),
        gone(2),
        born(3, 512),
        gone(3),
        born(4, 512),
        born(5, 512),
    ]
    result = read_history(events, PLACES, [])
    assert (
        result.records[0].role is StorageRole.WORKSPACE
        and result.records[0].name == LIBRARY_WORKSPACE
    )


def test_dropped_events_shift_what_was_noted() -> None:
    whole = [born(1, 1000), born(2, 600), gone(2), born(2, 700), gone(1), born(3, 512)]
    claims = [Claim(4, 2, 700, StorageRole.GRADIENTS, "w")]
    cut = read_history(whole[3:], PLACES, claims, first_position=3)
    assert [(r.role, r.phase) for r in cut.records] == [
        (StorageRole.GRADIENTS, TracePhase.BACKWARD),
        (StorageRole.TEMPORARIES, TracePhase.OPTIMIZER),
    ]


def test_a_long_history_is_joined_in_a_moment() -> None:
    events = [event for i in range(50_000) for event in (born(i % 97, 512), gone(i % 97))]
    places = [
        place(i, TracePhase.FORWARD, f"layers.{i % 32}", step=i // 50_000, scope=i)
        for i in range(0, 100_000, 10)
    ]
    claims = [
        Claim(i + 1, (i // 2) % 97, 512, StorageRole.GRADIENTS, str(i))
        for i in range(0, 100_000, 20)
    ]
    result = read_history(events, places, claims)
    assert len(result.records) == 50_000 and result.peak_bytes == 512 and result.seconds == 0
    assert sum(r.role is StorageRole.GRADIENTS for r in result.records) == len(claims)


def test_a_slowed_clock_is_said() -> None:
    facts = smi_values("570.86.15, 1200, 1980, 0x0000000000000024, Disabled, 84\n")
    assert facts["driver"] == "570.86.15"
    assert throttling_notes(facts) == [
        "the driver slowed the GPU while it was measured: power cap, heat (software) (clock 1200 of"
        " 1980 MHz)"
    ]
    assert throttling_notes({**facts, "throttling": "0x0000000000000001"}) == []
    assert throttling_notes({"throttling": "[N/A]"}) == [] and throttling_notes({}) == []
    assert spread_notes(TimeSpread(1.0, 0.99, 1.01, 5)) == [] and spread_notes(None) == []
    assert "spread of 40%" in spread_notes(TimeSpread(1.0, 0.8, 1.2, 5))[0]


def test_the_environment_is_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = describe_environment(torch.device("cpu"))
    assert (
        found["device"] == "cpu"
        and found["torch"]
        and found["allocator"] == "expandable_segments:True"
    )


def test_a_mig_slice_is_said_and_its_driver_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi has no answer for a slice's id: driver and mode are asked of the machine, clocks
    of nobody."""
    asked: list[list[str]] = []

    def smi(command: list[str], **_: Any) -> Any:
        asked.append(command)
        if any(word.startswith("--id=") for word in command):
            raise subprocess.CalledProcessError(6, command)
        return subprocess.CompletedProcess(
            command, 0, stdout="570.86.15, 1200, 1980, 0x0000000000000024, Enabled, 84\n"
        )

    monkeypatch.setattr(environment.subprocess, "run", smi)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1f0c"))
    facts = environment.smi_facts(torch.device("cuda", 0))
    assert facts == {"driver": "570.86.15", "mig": "Enabled"} and len(asked) == 2
    assert throttling_notes(facts) == []
    assert "MIG slice (3g.40gb)" in environment.slice_notes("NVIDIA H100 80GB HBM3 MIG 3g.40gb")[0]
    assert environment.slice_notes("NVIDIA H100 80GB HBM3") == []


def test_a_busy_gpu_is_said() -> None:
    figures = {
        "allocated": 0,
        "reserved": 0,
        "peak_allocated": 0,
        "peak_reserved": 0,
        "device_total": 80 << 30,
    }
    assert busy_notes(MemoryFigures(**figures, device_used=600 << 20)) == []
    assert (
        "20.0 GiB of the GPU were taken"
        in busy_notes(MemoryFigures(**figures, device_used=20 << 30))[0]
    )
    assert busy_notes(None) == []
    assert (
        disturbance_notes(1000, 1000) == []
        and "1.00 GiB more" in disturbance_notes(3 << 30, 2 << 30)[0]
    )


class FakeCuda:
    """torch.cuda's functions that CudaMemory calls, over the books of CPU tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.books, self.trace, self.recording, self.fraction = CpuMemory(), [], False, 1.0
        note = self.books._note

        def noted(is_allocation: bool, address: int, nbytes: int) -> None:
            note(is_allocation, address, nbytes)
            if self.recording:
                for action in ("alloc",) if is_allocation else ("free_requested", "free_completed"):
                    self.trace.append(
                        {"action": action, "addr": address, "size": nbytes, "stream": 0}
                    )

        monkeypatch.setattr(self.books, "_note", noted)
        for name in (
            "init",
            "memory_stats_as_nested_dict",
            "mem_get_info",
            "reset_peak_memory_stats",
            "memory_reserved",
            "set_per_process_memory_fraction",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(
            torch.cuda.memory,
            "_snapshot",
            lambda device: {"device_traces": [[], list(self.trace)], "segments": []},
        )

    def init(self) -> None:
        return None

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        assert device == torch.device("cuda:1")
        books = self.books._allocator
        total = self.books._num_events
        return {
            "allocation": {"all": {"allocated": total - 1, "freed": 1}},
            "allocated_bytes": {"all": {"current": books.allocated, "peak": books.peak_allocated}},
            "reserved_bytes": {"all": {"current": books.reserved, "peak": books.peak_reserved}},
            "num_alloc_retries": 2,
        }

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (60 << 30, 80 << 30)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.books.reset_peaks()

    def memory_reserved(self, device: torch.device) -> int:
        return 4 << 30

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    def record(self, *, enabled: str | None, **_: Any) -> None:
        self.recording = enabled is not None


def test_a_gpus_allocator_is_read_by_its_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    memory = CudaMemory(torch.device("cuda:1"))
    with fake.books:
        kept = torch.empty(1 << 20)
        assert memory.current() == (4 << 20, 20 << 20)
        with memory.history() as events:
            assert memory.position() == 0
            other = torch.empty(100)
            assert memory.position() == 1
            del other
            assert memory.position() == 2
        assert [(e.is_allocation, e.nbytes) for e in events] == [(True, 400), (False, 400)]
        assert memory.num_dropped == 0 and memory.recorded is not None and not fake.recording
        assert memory.peaks()[0] == (4 << 20) + 512
        memory.reset_peaks()
        assert memory.peaks() == memory.current()
        figures = memory.figures()
        assert (figures.device_used, figures.device_total, figures.num_retries) == (
            20 << 30,
            80 << 30,
            2,
        )
        memory.limit(0.5)
        assert fake.fraction == pytest.approx((4 + 30) / 80)
        memory.unlimit()
        assert fake.fraction == 1.0
        assert memory.address_of(kept) == 0  # on another device
