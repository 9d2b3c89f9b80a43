"""Real steps on a CPU: measured, traced and extrapolated agree to the byte; the history's
attribution agrees with the tracker's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from napkinmath.base.errors import InputError
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Timeline
from napkinmath.memory.allocator_settings import AllocatorSettings
from napkinmath_profiler.measuring import runner
from napkinmath_profiler.measuring.beside import traced_without_choices
from napkinmath_profiler.measuring.device_memory import CpuMemory
from napkinmath_profiler.measuring.measured_loop import MeasuredLoop, spread_of
from napkinmath_profiler.measuring.measurement import Measurement
from napkinmath_profiler.measuring.partial import plan_layers, whole_model
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_layers, measure_step
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import TrainMethod, config_from
from napkinmath_profiler.tracing.storage_events import StorageRole
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import LoopOptions

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 7,
        "max_position_embeddings": 64,
        **SIZES,
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 10,
        "head_dim": 8,
        "max_position_embeddings": 64,
        **SIZES,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 7,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointing": {"checkpointing": True},
    "lora": {"method": TrainMethod.LORA},
    "accumulated": {"loop": LoopOptions(gradient_accumulation_steps=2, max_grad_norm=1.0)},
}
# Where PyTorch keeps them on the host, the step counters of AdamW are no device's; "adamw-fused"
# keeps them beside the parameters.
OPTIMIZER = "adamw-fused"


def options(**changes: Any) -> TraceOptions:
    return TraceOptions(
        dtype="fp32", micro_batch_size=2, sequence_length=16, optimizer=OPTIMIZER, **changes
    )


def measured(config: dict[str, Any], chosen: TraceOptions, **how: Any) -> Measurement:
    return measure_step(
        config,
        chosen,
        MeasureOptions(**{"device": "cpu", "num_steps": 1, "num_warmup_steps": 0, **how}),
    )


@cache
def tracked(family: str, method: str) -> Measurement:
    return measured(CONFIGS[family], options(**METHODS[method]))


def events_of(result: TraceResult) -> list[tuple[bool, int, str, str, int]]:
    """Bookings in order; a tensor without bytes takes none (checkpointing makes one on the
    host)."""
    records = result.records
    return [
        (e.is_allocation, n, e.phase.value, e.module, e.step)
        for e in result.events
        if (n := records[e.storage_id].rounded_bytes)
    ]


def phase_peaks(timeline: Timeline) -> dict[Phase, int]:
    return {phase: point.nbytes for phase, point in timeline.phase_peaks().items()}


CASES = [
    (family, method)
    for family in CONFIGS
    for method in METHODS
    if method != "accumulated" or family == "llama"
]
FEW_LAYERS = [
    ("llama", "full"),
    ("llama", "checkpointing"),
    ("llama", "lora"),
    ("gemma2", "full"),
    ("gemma2", "lora"),
    ("gpt2", "full"),
    ("gpt2", "lora"),
]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_measured_step_is_the_traced_one(family: str, method: str) -> None:
    chosen, found = options(**METHODS[method]), tracked(family, method)
    assert found.result is not None and found.timeline is not None
    assert found.timeline.stamp.origin == "measured"
    assert events_of(found.result) == events_of(
        traced_without_choices(config_from(CONFIGS[family]), chosen)
    )


@pytest.mark.parametrize(("family", "method"), FEW_LAYERS)
def test_a_few_measured_layers_give_the_whole_model(family: str, method: str) -> None:
    config, chosen = CONFIGS[family], options(**METHODS[method])
    whole = tracked(family, method)
    plan = plan_layers(config, chosen, lambda count: count < config.get("num_hidden_layers", 7))
    assert not plan.is_whole and len(plan.kept) < whole.num_layers
    part, shorter = (measured(config, chosen, kept=kept) for kept in (plan.kept, plan.slope))
    written = whole_model(part, shorter, plan)
    assert whole.result is not None and whole.timeline is not None and written.result is not None
    assert events_of(written.result) == events_of(whole.result)
    assert written.phase_peaks == phase_peaks(whole.timeline)
    assert set(written.seconds) == set(whole.phases)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_the_allocators_history_tells_what_the_tracker_sees(family: str, method: str) -> None:
    """The path that a GPU is measured by, over the books that its allocator would keep."""
    chosen = options(**METHODS[method])
    by_tracker = tracked(family, method)
    by_history = measured(CONFIGS[family], chosen, stand_in=CpuMemory(), num_steps=2)
    one, other = by_tracker.timeline, by_history.timeline
    assert (
        one is not None
        and other is not None
        and by_history.memory is not None
        and by_tracker.memory is not None
    )
    assert phase_peaks(one) == phase_peaks(other)
    assert by_history.memory.allocated == by_tracker.memory.allocated
    assert max(s.peak_allocated for s in by_history.phases.values()) <= by_history.memory.allocated
    certain = (Role.WEIGHTS, Role.ADAPTERS, Role.GRADIENTS, Role.OPTIMIZER, Role.UNEXPLAINED)
    for point in one.phase_peaks().values():
        here, there = (
            one.breakdown(point),
            other.breakdown(other.phase_peaks()[one.segments[point.segment].phase]),
        )
        assert [here.get(role, 0) for role in certain] == [there.get(role, 0) for role in certain]
    assert other.breakdown(other.peak()).get(Role.UNEXPLAINED, 0) == 0


def test_what_was_allocated_before_is_no_part_of_the_step() -> None:
    """A process that measures again holds something from the time before: neither the figures nor
    the split by role count it."""
    kept, books = torch.empty(1 << 20), CpuMemory()
    books.adopt([kept])
    found, clean = (
        measured(CONFIGS["llama"], options(), stand_in=memory, num_steps=2)
        for memory in (books, CpuMemory())
    )
    assert found.memory is not None and clean.memory is not None and found.timeline is not None
    assert found.memory.before_allocated == kept.nbytes
    assert (found.memory.requested, found.memory.allocated) == (
        clean.memory.requested,
        clean.memory.allocated,
    )
    assert (
        found.memory.reserved >= clean.memory.reserved
    )  # a segment that was there serves the step, too
    assert Role.UNEXPLAINED not in found.timeline.breakdown(found.timeline.peak())
    assert not any("the notes taken" in note for note in found.notes)


def test_modules_are_known_in_the_backward_too() -> None:
    found = measured(CONFIGS["llama"], options(), stand_in=CpuMemory()).result
    assert found is not None
    named = [
        r
        for r in found.records
        if r.phase.value == "backward" and r.role is not StorageRole.GRADIENTS
    ]
    assert named and all(r.module for r in named if "layers.3" in r.module)
    assert {f"model.layers.{i}" for i in range(7)} <= {
        ".".join(r.module.split(".")[:3]) for r in named
    }


def test_quantized_weights_have_data_and_their_constants_are_found() -> None:
    chosen = options(method=TrainMethod.QLORA, checkpointing=True)
    by_tracker = measured(CONFIGS["llama"], chosen)
    by_history = measured(CONFIGS["llama"], chosen, stand_in=CpuMemory())
    assert by_tracker.timeline is not None and by_history.timeline is not None
    assert phase_peaks(by_tracker.timeline) == phase_peaks(by_history.timeline)
    assert by_history.timeline.breakdown(by_history.timeline.peak())[Role.QUANTIZATION] > 0


@pytest.mark.parametrize("limit_mib", [1, 2])
def test_running_out_of_memory_keeps_what_was_learned_and_frees_the_rest(limit_mib: int) -> None:
    config = {**CONFIGS["llama"], "vocab_size": 4096}
    free = measured(config, options(), stand_in=CpuMemory())
    assert free.memory is not None and free.memory.allocated > limit_mib << 20
    books = (
        CpuMemory(limit_bytes=limit_mib << 20)
        if limit_mib == 1
        else CpuMemory(limit_bytes=free.memory.allocated - (1 << 20) >> 21 << 21)
    )
    found = measured(config, options(), stand_in=books)
    assert found.failure is not None and "Tried to allocate" in found.failure.message
    assert books.figures().allocated == 0
    if limit_mib == 1:
        assert found.failure.stage == "building"
    else:
        assert (
            found.failure.stage == "attributing"
            and found.failure.phase
            and found.failure.held_by_role["parameters"] > 0
        )
        assert found.timeline is not None and found.timeline.peak().nbytes > 1 << 20


BEYOND_THE_ALLOCATOR = [
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 8 bytes."
    ),
    MemoryError(),
]


@pytest.mark.parametrize(
    "error", BEYOND_THE_ALLOCATOR, ids=lambda error: str(error)[:24] or type(error).__name__
)
def test_running_out_beyond_the_allocator_is_out_of_memory_too(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's, a library's or the host's own refusal in the timed steps: the attributed ones
    are kept."""

    def failing(self: MeasuredLoop, count: int) -> None:
        raise error

    whole = MeasuredLoop.timed_steps
    monkeypatch.setattr(
        MeasuredLoop,
        "timed_steps",
        lambda self, count: whole(self, count) if count == 2 else failing(self, count),
    )
    found = measured(CONFIGS["llama"], options(), num_steps=3)
    assert found.failure is not None and found.failure.stage == "timing"
    assert found.failure.message == (str(error) or "the host's memory ran out")
    assert found.timeline is not None and found.timeline.peak().nbytes > 0


def test_other_errors_are_no_exhaustion(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: MeasuredLoop, count: int) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(MeasuredLoop, "timed_steps", failing)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measured(CONFIGS["llama"], options())


def test_of_several_gpus_the_measured_one_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA events and caches are those of the current device: it has to be the one measured, and
    only meanwhile."""
    current = [0]

    class OnDevice:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Books(CpuMemory):
        def __init__(self, device: torch.device) -> None:
            super().__init__()

        def limit(self, share: float) -> None:
            assert current == [1]
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(runner, "CudaMemory", Books)
    with pytest.raises(KeyboardInterrupt):
        measured(CONFIGS["llama"], options(), device="cuda:1")
    assert current == [0]
    with pytest.raises(InputError, match=r"no cuda:2; PyTorch sees 2"):
        measured(CONFIGS["llama"], options(), device="cuda:2")


def test_one_two_and_three_layers() -> None:
    found = measure_layers(
        CONFIGS["llama"], options(), MeasureOptions(device="cpu", num_steps=1, num_warmup_steps=0)
    )
    assert [m.num_layers for m in found] == [1, 2, 3] and all(m.total_layers == 7 for m in found)
    peaks = [m.timeline.peak().nbytes for m in found if m.timeline is not None]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0
    assert all(m.step is not None and m.step.median_s > 0 for m in found)


def test_attribution_can_be_left_out() -> None:
    found = measured(CONFIGS["llama"], options(), attribute=False, num_steps=3)
    assert found.timeline is None and found.step is not None and found.step.num_samples == 3
    assert list(found.phases) == [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.STEP]
    assert found.tokens == 32 and found.tokens_per_s is not None


def test_the_stand_in_books_as_the_allocator_does() -> None:
    with CpuMemory(AllocatorSettings()) as books:
        kept = torch.empty(600, dtype=torch.uint8)
        with books.history() as events:
            other = torch.empty(3 << 20, dtype=torch.uint8)
            view = other[5:]
            del other
            assert books.position() == 1
            del view
        assert [(e.is_allocation, e.nbytes) for e in events] == [(True, 3 << 20), (False, 3 << 20)]
        assert events[0].address == events[1].address
        figures = books.figures()
        assert figures.allocated == 1024 and figures.reserved == (2 << 20) + (20 << 20)
        assert books.address_of(kept) > 0
        with CpuMemory(limit_bytes=2 << 20), pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 << 20)


def test_spread() -> None:
    few, many = spread_of([3.0, 1.0, 2.0]), spread_of([float(i) for i in range(101)])
    assert (few.median_s, few.low_s, few.high_s) == (2.0, 1.0, 3.0)
    assert (many.median_s, many.low_s, many.high_s) == (50.0, 10.0, 90.0)


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="unknown to PyTorch"):
        measured(CONFIGS["llama"], options(), device="abacus")
    with pytest.raises(InputError, match="cannot be measured"):
        measured(CONFIGS["llama"], options(), device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            measured(CONFIGS["llama"], options(), device="cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_gpus_history_is_attributed(method: str) -> None:
    found = measure_step(CONFIGS["llama"], options(**METHODS[method]), MeasureOptions(num_steps=3))
    assert (
        found.failure is None
        and found.timeline is not None
        and found.memory is not None
        and found.snapshot is not None
    )
    assert found.timeline.breakdown(found.timeline.peak()).get(Role.UNEXPLAINED, 0) == 0
    assert found.memory.requested <= found.memory.allocated <= found.memory.reserved
