"""Every valid mesh, the search against pricing all of them, and what an Estimate says of the winner."""

from __future__ import annotations

import time

import pytest
from napkinmath import estimate
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.models import read_model
from napkinmath.cluster import Cluster, NetworkLink
from napkinmath.efficiency import default_efficiency
from napkinmath.errors import InputError
from napkinmath.meshes import Bounds, fastest, meshes, price_mesh
from napkinmath.train_config import Precision, RecomputeConfig, RecomputeKind, TrainConfig

MODEL = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
MOE = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
SEARCH_S = 2.0


def cluster(gpus: int, memory_gib: int = 80) -> Cluster:
    hardware = find_hardware("H100-80").replace(memory_bytes=memory_gib << 30)
    return Cluster(hardware=hardware, gpus_per_node=8, num_nodes=gpus // 8, network=NetworkLink(kind="InfiniBand", gbit_per_s_per_gpu=400))


def config(**changes: object) -> TrainConfig:
    return TrainConfig(
        sequence_length=2048, stack="megatron", precision=Precision.BF16, recompute=RecomputeConfig(kind=RecomputeKind.FULL)
    ).replace(**changes)


def degrees(found: TrainConfig) -> tuple[int, int, int, int, int]:
    p = found.parallel
    return p.tensor_parallel_size, p.pipeline_parallel_size, p.context_parallel_size, p.expert_parallel_size, p.data_parallel_size


def test_the_meshes_are_those_that_divide() -> None:
    found = [degrees(mesh) for mesh in meshes(read_model(MODEL), cluster(16), config(), global_batch=64)]
    assert len(set(found)) == len(found)
    expected = {
        (t, p, c, 1, 16 // (t * p * c)) for t in (1, 2, 4, 8) for p in range(1, 13) for c in (1, 2, 4, 8, 16) if 16 % (t * p * c) == 0
    }
    assert set(found) == expected


def test_experts_are_spread_within_data_and_context_ranks() -> None:
    found = [degrees(mesh) for mesh in meshes(read_model(MOE), cluster(8), config(), global_batch=64)]
    assert {e for *_, e, _ in found} == {1, 2, 4, 8}
    assert all((c * d) % e == 0 for _, _, c, e, d in found)


@pytest.mark.parametrize(
    ("model", "memory"),
    [(MODEL, 80), (MODEL, 8), (MOE, 80), (MOE, 12)],
    ids=["dense", "dense, little memory", "experts", "experts, little memory"],
)
def test_the_search_finds_what_pricing_all_finds(model: dict[str, object], memory: int) -> None:
    spec, machines = read_model(model), cluster(16 if model is MODEL else 8, memory)
    speed = default_efficiency(machines.hardware.gpu)
    everything = [price_mesh(spec, mesh, machines, speed) for mesh in meshes(spec, machines, config(), global_batch=64)]
    fitting = sorted((p for p in everything if p.peak_bytes <= memory << 30), key=lambda p: -p.tokens_per_s)
    assert [p.config for p in fastest(spec, config(), machines, speed, global_batch=64, most=3)] == [p.config for p in fitting[:3]]
    bounds = Bounds(spec, machines, speed)
    for price in everything:
        assert bounds.tokens_per_s(price.config) >= price.tokens_per_s
        assert bounds.bytes(price.config) <= price.peak_bytes


def test_the_winner_is_priced_as_its_estimate() -> None:
    spec, machines = read_model(MODEL), cluster(16)
    speed = default_efficiency(machines.hardware.gpu)
    for price in fastest(spec, config(), machines, speed, global_batch=64, most=4):
        found = estimate(spec, price.config, hardware=machines)
        assert found.throughput is not None
        assert found.throughput.tokens_per_s == pytest.approx(price.tokens_per_s, rel=1e-9)
        assert found.peak.nbytes == price.peak_bytes


def test_a_thousand_gpus_are_searched_in_two_seconds() -> None:
    spec, machines = read_model("llama-3.1-70b"), cluster(1024)
    speed = default_efficiency(machines.hardware.gpu)
    started = time.process_time()
    found = fastest(spec, config(sequence_length=4096), machines, speed, global_batch=1024)
    assert time.process_time() - started <= SEARCH_S
    assert found and found[0].parallel.world_size == 1024


def test_a_batch_that_no_mesh_divides_is_one_line() -> None:
    with pytest.raises(InputError, match="no mesh of 16 GPUs of 7 sequences"):
        meshes(read_model(MODEL), cluster(16), config(micro_batch_size=2), global_batch=7)
