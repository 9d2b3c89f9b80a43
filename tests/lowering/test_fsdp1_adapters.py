"""PEFT's cast of an adapter's input under FSDP, whose units decide which type its weight shows."""

from __future__ import annotations

import pytest
from napkinmath import estimate
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import AdapterConfig, Precision, TrainConfig
from napkinmath.estimate import Estimate

AUTOCAST = Precision.BF16_AUTOCAST
# On one GPU autocast casts the adapters' weights too, a fortieth of what it moves here.
OWN_WEIGHTS = 0.03


def casts(e: Estimate) -> float:
    """Bytes that casts move in a step's layers."""
    return sum(
        kernel.moved * segment.repeat
        for segment in e.timeline.segments
        for action, index in segment.events
        if action == "!" and (kernel := segment.kernels[index]).name == "to"
    )


def priced(precision: Precision, kind: DataParallel = DataParallel.NONE) -> Estimate:
    """LoRA of a small Llama on one A100, or on two that share its weights."""
    ranks = 1 if kind is DataParallel.NONE else 2
    config = TrainConfig(
        micro_batch_size=1,
        sequence_length=512,
        precision=precision,
        adapter=AdapterConfig(),
        parallel=ParallelConfig(data_parallel=kind, data_parallel_size=ranks),
    )
    gpu = find_hardware("A100")
    machine = gpu if ranks == 1 else Cluster(hardware=gpu, gpus_per_node=ranks, num_nodes=1)
    found = estimate("llama-3.2-1b", config, hardware=machine)
    assert found.time is not None
    return found


def test_an_adapter_unit_of_fsdp1_shows_its_fp32_shard() -> None:
    """peft casts to the type of lora_A.weight before lora_A's unit is gathered, and FSDP casts back:
    as much as on one GPU, where adapters are fp32 (pinned from both sources' code)."""
    alone = casts(priced(AUTOCAST))
    assert alone > 0
    own_units = casts(priced(AUTOCAST, DataParallel.FSDP1))
    assert own_units == pytest.approx(alone, rel=OWN_WEIGHTS)


def test_a_layer_unit_of_fsdp2_shows_the_gathered_type() -> None:
    """What is left are the norms' casts."""
    assert casts(priced(AUTOCAST, DataParallel.FSDP2)) < 0.5 * casts(priced(AUTOCAST))


def test_adapters_without_autocast_are_read_as_they_are() -> None:
    """No mixed precision, no second type."""
    assert casts(priced(Precision.BF16, DataParallel.FSDP1)) == pytest.approx(
        casts(priced(Precision.BF16)), rel=0.01
    )
