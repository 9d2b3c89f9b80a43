"""cuBLAS's workspaces, which no operation of a trace asks for: where a GPU is known they are part
of what is traced, as of what is priced."""

from __future__ import annotations

import pytest
from napkinmath.catalog.gpus import find_hardware
from napkinmath.estimate import estimate
from napkinmath.inputs.options import train_config
from napkinmath.memory.replay import replay
from napkinmath_profiler.trace import trace_options
from napkinmath_profiler.tracing.library_workspaces import with_product_workspaces
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_options import options_from
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from profiler.traced_families import FAMILIES

H100, MIB = "H100-SXM5-80GB", 1 << 20
FLAGS = {"bs": 2, "ctx": 32, "method": "lora", "precision": "bf16"}
AGREED = 0.01  # of what is traced and priced of so small a model, beside its workspaces


@pytest.fixture(scope="module")
def plain() -> TraceResult:
    return trace_options(
        config_from(FAMILIES["llama"]), options_from(train_config(FLAGS), compute_capability=(9, 0))
    )


def test_a_trace_for_a_gpu_holds_what_the_estimate_for_it_holds(plain: TraceResult) -> None:
    hardware = find_hardware(H100)
    workspace = hardware.gpu.cublas_workspace_bytes
    assert workspace == 32 * MIB
    priced = estimate(FAMILIES["llama"], train_config(FLAGS), hardware=hardware).replay
    traced = replay(timeline_of(with_product_workspaces(plain, workspace)))
    assert traced.peak_allocated - 2 * workspace == replay(timeline_of(plain)).peak_allocated
    assert traced.peak_allocated - 2 * workspace == pytest.approx(
        priced.peak_allocated - 2 * workspace, rel=AGREED
    )
    assert traced.peak_reserved == priced.peak_reserved


def test_each_thread_has_one_from_its_first_product_on(plain: TraceResult) -> None:
    found = with_product_workspaces(plain, MIB)
    made = [record for record in found.records if record.op == "cuBLAS"]
    assert [(r.phase, r.role, r.died) for r in made] == [
        (p, StorageRole.WORKSPACE, None) for p in (TracePhase.FORWARD, TracePhase.BACKWARD)
    ]
    for record in made:
        after = found.events[record.born + 1]
        assert found.events[record.born].storage_id == record.storage_id
        assert (
            found.records[after.storage_id].op.startswith("aten.mm") and after.phase is record.phase
        )
    assert len(found.events) == len(plain.events) + 2


def test_every_moment_still_adds_up(plain: TraceResult) -> None:
    found = with_product_workspaces(plain, MIB)
    live = 0
    for index, event in enumerate(found.events):
        size = found.records[event.storage_id].rounded_bytes
        live += size if event.is_allocation else -size
        if index % 97 == 0:
            assert sum(r.rounded_bytes for r in found.live_at(index)) == live
    assert found.saved_bytes == plain.saved_bytes  # they are kept, and not for the backward
    assert found.peak_bytes == plain.peak_bytes + 2 * MIB


def test_without_a_gpu_nothing_is_added(plain: TraceResult) -> None:
    assert with_product_workspaces(plain, 0) is plain
