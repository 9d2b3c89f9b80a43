"""What must hold of every trace, over every family and method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from napkinmath_profiler.trace import trace_config
from napkinmath_profiler.tracing import meta_results, storage_tracker
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


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3"])
def test_results_that_are_kept_are_those_of_torch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, strides and types: an operation is run beside the result that was kept of it."""
    hits: list[object] = []

    def both(func: Any, args: Any, kwargs: Any) -> Any:
        out = meta_results.on_meta(func, args, kwargs)
        if meta_results._is_fresh(func):
            hits.append(func)
            assert made_of(func(*args, **kwargs)) == made_of(out), func
        return out

    monkeypatch.setattr(storage_tracker, "on_meta", both)
    trace_config(FAMILIES[family], sequence_length=16, micro_batch_size=2, checkpointing=True)
    assert len(hits) > 500


def made_of(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        storage = out.untyped_storage().nbytes()
        return out.shape, out.stride(), out.dtype, out.storage_offset(), out.device, storage
    return [made_of(part) for part in out] if isinstance(out, (list, tuple)) else out


def test_a_view_that_its_schema_hides_is_made_anew() -> None:
    x, shape = torch.empty(4, 6, device="meta"), (6, 4)
    for _ in range(2):
        out = meta_results.on_meta(torch.ops.aten._unsafe_view.default, (x, shape), {})
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_types_of_numbers_are_told_apart() -> None:
    x = torch.empty(3, dtype=torch.int64, device="meta")
    add = torch.ops.aten.add.Tensor
    found = [meta_results.on_meta(add, (x, one), {}).dtype for one in (1, 1.0, True, 1, 1.0)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]


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
