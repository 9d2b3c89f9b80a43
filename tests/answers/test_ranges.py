"""Ranges: what few sources say is said with more doubt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from napkinmath.answers import ranges
from napkinmath.answers.ranges import Spread, reserved_range
from napkinmath.answers.speed_range import speed_doubts
from napkinmath.answers.verdict import room_for
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import Precision
from napkinmath.estimate import estimate

SPREADS = {name: value for name, value in vars(ranges).items() if isinstance(value, Spread)}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_a_span_encloses_that_of_more_sources(spread: Spread) -> None:
    books = estimate("tinyllama", sequence_length=128).replay
    few = [
        reserved_range(books, 1 << 28, spread.replace(rests_on=n), 0.0, 0.0)
        for n in (1, 2, 4, 9, 0)
    ]
    for wide, narrow in pairwise(few):
        assert wide.value == narrow.value == books.peak_reserved
        assert wide.low < narrow.low
        assert wide.high > narrow.high


def test_one_source_says_less_than_its_own_quantiles() -> None:
    spread = ranges.RESERVED_BY_LENGTHS
    assert spread.rests_on == 1
    assert spread.widening == pytest.approx(2**0.5)
    assert Spread(base=0.1).widening == 1.0


@pytest.mark.parametrize("gpus", [1, 8])
def test_each_doubt_is_named_and_they_make_the_span(gpus: int) -> None:
    kind = DataParallel.FSDP2 if gpus > 1 else DataParallel.NONE
    e = estimate(
        "llama-7b",
        sequence_length=512,
        parallel=ParallelConfig(data_parallel=kind, data_parallel_size=gpus),
        hardware=Cluster(hardware=find_hardware("B300"), gpus_per_node=gpus),
    )
    doubts, device = ranges.memory_doubts(e), e.memory.device
    assert [d.name for d in doubts] == ["operations", "cache", "communicators"][: 2 + (gpus > 1)]
    assert sum(d.below for d in doubts) == pytest.approx(device.value - device.low, rel=1e-6)
    assert sum(d.above for d in doubts) >= device.high - device.value - 1


@pytest.mark.parametrize(
    ("stack", "ranks", "above"), [("nemo", 2, None), ("hf-bare", 1, 0.15), ("hf-bare", 2, 0.4)]
)
def test_fp8_is_doubted_where_its_scales_are_not_known(
    stack: str, ranks: int, above: float | None
) -> None:
    """Transformer Engine's casts are checked by several tables; of torchao it is not known whether
    a tensor has one scale or one a row, which tensor parallelism makes dear."""
    e = estimate(
        "llama-3.1-8b",
        precision=Precision.FP8,
        stack=stack,
        sequence_length=512,
        parallel=ParallelConfig(tensor_parallel_size=ranks, sequence_parallel=ranks > 1),
        hardware=Cluster(hardware=find_hardware("H100"), gpus_per_node=ranks),
    )
    assert {d.name: d.above for d in speed_doubts(e)}.get("FP8") == above


@pytest.mark.parametrize(("imbalance", "is_doubted"), [(1.0, True), (1.3, False)])
def test_what_routers_send_is_doubted_where_nobody_says(imbalance: float, is_doubted: bool) -> None:
    e = estimate(
        "mixtral-8x7b",
        micro_batch_size=8,
        sequence_length=2048,
        parallel=ParallelConfig(
            data_parallel=DataParallel.ZERO1,
            data_parallel_size=8,
            expert_parallel_size=8,
            expert_imbalance=imbalance,
        ),
        hardware=Cluster(hardware=find_hardware("H100"), gpus_per_node=8),
    )
    more = {d.name: d.above for d in ranges.memory_doubts(e)}.get("experts", 0.0)
    assert (more > 0) == is_doubted
    memory = e.memory
    base = ranges.ALLOCATED_ON_SEVERAL.base * ranges.ALLOCATED_ON_SEVERAL.widening
    assert memory.allocated.high == pytest.approx(memory.allocated.value * (1 + base) + more)


@pytest.mark.parametrize(
    ("model", "gpu", "compiled", "names"),
    [
        ("llama-3.2-1b", "MI300X", True, {"plain PyTorch", "compiled"}),
        ("llama-3.2-1b", "H100", True, {"compiled"}),
        ("qwen3-30b-a3b", "A100", False, {"experts"}),
        ("llama-3.2-1b", "A100", False, set[str]()),
    ],
)
def test_speeds_are_doubted_by_name(model: str, gpu: str, compiled: bool, names: set[str]) -> None:
    e = estimate(model, sequence_length=512, compile=compiled, hardware=find_hardware(gpu))
    assert {d.name for d in speed_doubts(e)} - {"kernels", "host"} == names


def test_a_verdict_has_the_doubt_of_its_number_of_gpus() -> None:
    hardware = find_hardware("H100")
    for ranks, spread in ((1, ranges.ALLOCATED), (8, ranges.ALLOCATED_ON_SEVERAL)):
        share = spread.base * spread.widening
        low, high = hardware.usable_range
        assert room_for(hardware, ranks, sure=True) == int(low / (1 + share))
        assert room_for(hardware, ranks, sure=False) == int(high / (1 - share))


def test_more_than_two_cards_may_cross_a_slow_link() -> None:
    """Two machines of nccl-tests: four RTX PRO 6000 reach 23 GB/s, four L40S 5, pairs 32 and 20."""

    def slot(gpus: int) -> float:
        e = estimate(
            "llama-3.2-1b",
            sequence_length=512,
            parallel=ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=gpus),
            hardware=Cluster(hardware=find_hardware("L40S"), gpus_per_node=gpus),
        )
        return next(d.above for d in speed_doubts(e) if d.name == "slot")

    assert slot(4) > 2 * slot(2)


def test_gpus_of_several_powers_are_doubted_by_the_watts() -> None:
    """One NVIDIA laptop GPU is built at 80 to 150 W; a named limit leaves no such doubt."""

    def above(gpu: str, watts: float = 0.0) -> float:
        hardware = find_hardware(gpu)
        if watts:
            hardware = hardware.replace(gpu=hardware.gpu.replace(power_limit_w=watts))
        found = speed_doubts(estimate("tinyllama", sequence_length=512, hardware=hardware))
        return next((d.above for d in found if d.name == "power"), 0.0)

    assert above("RTX 4090 Laptop GPU") > 0.1
    assert above("RTX 4090 Laptop GPU", 100) == 0.0
    assert above("RTX 4090") == 0.0
    # 505 TFLOP/s of Megatron on Alps, where 700 are priced (benchmarks/data, fifth table)
    assert above("GH200") > 0.25
