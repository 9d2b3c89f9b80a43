"""What must hold of every trace, over every family and method."""

from __future__ import annotations

import pytest
from napkinmath_profiler.trace import trace_config
from napkinmath_profiler.tracing.meta_model import TrainMethod
from napkinmath_profiler.tracing.storage_events import PERSISTENT_ROLES, StorageRole
from napkinmath_profiler.tracing.trace_result import TraceResult
from profiler.traced_families import FAMILIES, WITHOUT_ALL_LINEAR_LORA

METHODS = {
    "full": {},
    "full-checkpointed": {"checkpointing": True},
    "lora-reentrant": {"method": TrainMethod.LORA, "checkpointing": True, "use_reentrant": True},
}


def assert_sound(result: TraceResult) -> None:
    live = 0
    alive: set[int] = set()
    for event in result.events:
        size = result.records[event.storage_id].rounded_bytes
        if event.is_allocation:
            assert event.storage_id not in alive
            alive.add(event.storage_id)
            live += size
        else:
            alive.remove(event.storage_id)
            live -= size
        assert live >= 0
    leftover = [r for r in result.live_at(len(result.events) - 1) if r.role not in PERSISTENT_ROLES]
    assert leftover == [], "only persistent storages may outlive a step"
    assert not [r for r in result.records if r.role in (None, StorageRole.UNATTRIBUTED)]
    peak = result.peak
    assert sum(result.bytes_by_role(peak.event_index).values()) == peak.requested_bytes
    assert peak.requested_bytes == max(
        moment.requested_bytes for moment in result.peak_by_phase().values()
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_trace_is_sound(family: str, method: str) -> None:
    if method.startswith("lora") and family in WITHOUT_ALL_LINEAR_LORA:
        pytest.skip("PEFT refuses all-linear here")
    assert_sound(
        trace_config(FAMILIES[family], sequence_length=16, micro_batch_size=2, **METHODS[method])
    )


@pytest.mark.parametrize("method", [TrainMethod.FULL, TrainMethod.LORA, TrainMethod.QLORA])
def test_the_same_case_traced_twice_gives_identical_events(method: TrainMethod) -> None:
    options = {"sequence_length": 32, "method": method, "checkpointing": True}
    first, second = (trace_config(FAMILIES["llama"], **options) for _ in range(2))
    assert first.events == second.events
    assert [(r.requested_bytes, r.role, r.op, r.module) for r in first.records] == [
        (r.requested_bytes, r.role, r.op, r.module) for r in second.records
    ]


def test_persistent_bytes_are_those_of_the_parameters() -> None:
    result = trace_config(FAMILIES["llama"], sequence_length=16)
    held = result.persistent_bytes()
    assert held[StorageRole.GRADIENTS] == held[StorageRole.WEIGHTS]
    assert held[StorageRole.OPTIMIZER_STATES] == 2 * held[StorageRole.WEIGHTS]


def test_eval_mode_switches_checkpointing_off() -> None:
    training, evaluating = (
        trace_config(FAMILIES["llama"], sequence_length=64, checkpointing=True, training=training)
        for training in (True, False)
    )
    assert evaluating.saved_bytes > 2 * training.saved_bytes
