"""Paged optimizer states that the device has no room for cross the host link in every step."""

from __future__ import annotations

import pytest
from napkinmath import TrainConfig, estimate
from napkinmath.catalog.gpus import find_gpu
from napkinmath.config.hardware import Hardware
from napkinmath.models.read import read_model
from napkinmath.planning.sweep import sweep
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.schedule import HOST_LINK

GIB = 2**30
MODEL = "llama-3.2-1b"
CONFIG = TrainConfig(optimizer="paged-adamw-8bit", micro_batch_size=1, sequence_length=512)


def on(gib: float, config: TrainConfig = CONFIG, gpu: str = "rtx4090"):
    return estimate(
        MODEL, config, hardware=Hardware(gpu=find_gpu(gpu), memory_bytes=int(gib * GIB))
    )


def test_pages_that_fit_stay() -> None:
    roomy = on(24)
    assert roomy.managed_bytes > 2 * GIB  # two bytes a parameter but for small ones
    assert roomy.time is not None and roomy.time.paging_s == 0.0


def test_pages_without_room_go_in_and_out() -> None:
    roomy, tight = on(24), on(7)
    assert roomy.time is not None and tight.time is not None
    assert (
        tight.peak.nbytes
        < Hardware(gpu=find_gpu("rtx4090"), memory_bytes=7 * GIB).usable_bytes
        < tight.peak.nbytes + tight.managed_bytes
    )
    link = default_efficiency(find_gpu("rtx4090")).pinned_bytes_per_s
    assert tight.time.seconds - roomy.time.seconds == pytest.approx(
        2 * tight.managed_bytes / link, rel=1e-3
    )
    assert tight.time.share(HOST_LINK) == pytest.approx(tight.time.paging_s / tight.time.seconds)
    assert sum(
        tight.time.share(bound) for bound in ("compute", "bandwidth", "launch", HOST_LINK)
    ) == pytest.approx(1.0)


def test_memory_shared_with_the_host_moves_nothing() -> None:
    shared = on(7, gpu="gb10")
    assert shared.time is not None and shared.time.paging_s == 0.0


def test_sweep_agrees() -> None:
    lengths = [128, 512, 2048, 8192]
    hardware = Hardware(gpu=find_gpu("rtx4090"), memory_bytes=12 * GIB)
    found = sweep(read_model(MODEL), CONFIG, sequence_length=lengths, hardware=hardware)
    assert found.seconds is not None
    each = [
        estimate(MODEL, CONFIG.replace(sequence_length=length), hardware=hardware).time
        for length in lengths
    ]
    assert {t.paging_s > 0 for t in each if t is not None} == {False, True}
    assert list(found.seconds) == pytest.approx([t.seconds for t in each if t is not None])
