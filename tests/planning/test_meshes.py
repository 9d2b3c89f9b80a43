"""Every valid mesh, the search against pricing all of them, and what an Estimate says of the
winner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster, NetworkLink
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, PipelineSchedule
from napkinmath.config.train_config import Precision, RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.lowering.parallel.stage_order import FORWARD, in_flight, stage_order
from napkinmath.models.read import read_model
from napkinmath.planning import mesh_bounds
from napkinmath.planning import meshes as searched
from napkinmath.planning.mesh_bounds import AlikeSteps, Bounds
from napkinmath.planning.meshes import MeshPrice, fastest, meshes, price_mesh
from napkinmath.timing.efficiency import default_efficiency

if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec

MODEL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
MOE = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 2,
    "topk_group": 1,
}


def cluster(gpus: int, memory_gib: int = 80) -> Cluster:
    hardware = find_hardware("H100-80").replace(memory_bytes=memory_gib << 30)
    return Cluster(
        hardware=hardware,
        gpus_per_node=8,
        num_nodes=gpus // 8,
        network=NetworkLink(kind="InfiniBand", gbit_per_s_per_gpu=400),
    )


def config(**changes: object) -> TrainConfig:
    return TrainConfig(
        sequence_length=2048,
        stack="megatron",
        precision=Precision.BF16,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
    ).replace(**changes)


def degrees(found: TrainConfig) -> tuple[int, int, int, int, int]:
    p = found.parallel
    return (
        p.tensor_parallel_size,
        p.pipeline_parallel_size,
        p.context_parallel_size,
        p.expert_parallel_size,
        p.data_parallel_size,
    )


def test_the_meshes_are_those_that_divide() -> None:
    found = [
        degrees(mesh) for mesh in meshes(read_model(MODEL), cluster(16), config(), global_batch=64)
    ]
    assert len(set(found)) == len(found)
    expected = {
        (t, p, c, 1, 16 // (t * p * c))
        for t in (1, 2, 4, 8)
        for p in range(1, 13)
        for c in (1, 2, 4, 8, 16)
        if 16 % (t * p * c) == 0
    }
    assert set(found) == expected


@pytest.mark.parametrize(("stack", "apart"), [("hf", False), ("megatron", True)])
def test_experts_are_spread_within_the_ranks_of_a_stage(stack: str, apart: bool) -> None:
    """Over tensor-parallel ranks too, where those of the stack send their own tokens."""
    found = meshes(read_model(MOE), cluster(8), config(stack=stack), global_batch=64)
    assert {mesh.parallel.expert_parallel_size for mesh in found} == {1, 2, 4, 8}
    own = [
        p for p in (m.parallel for m in found) if p.expert_tensor_ranks != p.tensor_parallel_size
    ]
    assert bool(own) == apart
    assert all(p.expert_tensor_ranks == 1 < p.tensor_parallel_size for p in own)
    for p in (mesh.parallel for mesh in found):
        ranks = p.tensor_parallel_size * p.context_parallel_size * p.data_parallel_size
        assert ranks % (p.expert_parallel_size * p.expert_tensor_ranks) == 0
    assert len({(*degrees(mesh), mesh.parallel.expert_tensor_ranks) for mesh in found}) == len(
        found
    )


PARTITIONED = {"parallel": ParallelConfig(data_parallel=DataParallel.ZERO1, data_parallel_size=2)}
SHARDED = {
    "stack": "hf",
    "parallel": ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=2),
}
INTERLEAVED = {
    "parallel": ParallelConfig(
        pipeline_schedule=PipelineSchedule.INTERLEAVED, virtual_pipeline_size=2
    )
}
ROLLED = {"stack": "hf", "workload": Workload(kind=WorkloadKind.GRPO, rollout="vllm")}
APART = {
    "stack": "hf",
    "workload": Workload(
        kind=WorkloadKind.GRPO, rollout="vllm", rollout_gpus="2xh100", rollout_staleness=1
    ),
}
KEPT = {"stack": "hf", "recompute": RecomputeConfig()}  # DDP of torch, no checkpointing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "memory", "changes"),
    [
        (MODEL, 80, {}),
        (MODEL, 8, {}),
        (MODEL, 80, KEPT),
        (MODEL, 80, INTERLEAVED),
        (MODEL, 80, SHARDED),
        (MODEL, 80, ROLLED),
        (MODEL, 80, APART),
        (MOE, 80, {}),
        (MOE, 12, {}),
        (MOE, 80, PARTITIONED),
        (LATENT, 80, {}),
        (LATENT, 3, {}),
    ],
    ids=[
        "dense",
        "dense, little memory",
        "all kept",
        "interleaved",
        "sharded",
        "rolled out",
        "rolled out apart",
        "experts",
        "experts, little memory",
        "partitioned",
        "dense and experts",
        "both, little memory",
    ],
)
def test_the_search_finds_what_pricing_all_finds(
    model: dict[str, object], memory: int, changes: dict[str, object]
) -> None:
    spec, machines, chosen = (
        read_model(model),
        cluster(16 if model is MODEL else 8, memory),
        config(**changes),
    )
    speed = default_efficiency(machines.hardware.gpu)
    everything = [
        price_mesh(spec, mesh, machines, speed)
        for mesh in meshes(spec, machines, chosen, global_batch=64)
    ]
    fitting = sorted(
        (p for p in everything if p.peak_bytes <= memory << 30), key=lambda p: -p.tokens_per_s
    )
    assert fitting
    assert [p.config for p in fastest(spec, chosen, machines, speed, global_batch=64, most=3)] == [
        p.config for p in fitting[:3]
    ]
    bounds, coarse = Bounds(spec, machines, speed), Bounds(spec, machines, speed)
    for price in everything:
        assert bounds.tokens_per_s(price.config) >= price.tokens_per_s
        assert bounds.bytes(price.config) <= price.peak_bytes
    for price in everything:
        if price.parallel.tensor_parallel_size == 1:
            coarse.split(price.config)
    for price in everything:
        assert coarse.ceiling(price.config) >= price.tokens_per_s
        assert coarse.stored_bytes(price.config) <= price.peak_bytes
    assert coarse.reach([p.config for p in everything]) >= fitting[0].tokens_per_s


@pytest.mark.parametrize("shards", (DataParallel.DDP, DataParallel.ZERO1, DataParallel.FSDP2))
def test_a_step_serves_other_micro_batches_of_its_mesh(
    shards: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, machines, built = read_model(MODEL), cluster(8), list[object]()
    speed = default_efficiency(machines.hardware.gpu)
    build = mesh_bounds.build_step

    def counted(*args: Any) -> Any:
        built.append(args)
        return build(*args)

    monkeypatch.setattr(mesh_bounds, "build_step", counted)
    steps = AlikeSteps()
    for batch in (1, 2, 4):
        parallel = ParallelConfig(data_parallel=shards)
        chosen = config(stack="hf", micro_batch_size=batch, parallel=parallel)
        among = meshes(spec, machines, chosen)
        shared, own = Bounds(spec, machines, speed), Bounds(spec, machines, speed)
        before = len(built)
        reach = shared.reach(among, steps)
        assert (len(built) == before) is (batch > 1)
        assert reach == own.reach(among)
        for mesh in among:
            if own.knows(mesh):
                assert shared.bytes(mesh) == own.bytes(mesh)
                assert shared.tokens_per_s(mesh) == own.tokens_per_s(mesh)


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_micro_batches_in_flight_are_counted_as_one_by_one(schedule: PipelineSchedule) -> None:
    chunks = schedule.record.usual_chunks
    parallel = ParallelConfig(
        pipeline_parallel_size=4, pipeline_schedule=schedule, virtual_pipeline_size=chunks
    )
    for rank in range(4):
        for count in (4, 8, 24):
            order = stage_order(parallel, rank, count)
            live, most = dict[int, int](), dict[int, int]()
            for what, chunk in (turn for times, turns in order for turn in turns * times):
                live[chunk] = live.get(chunk, 0) + (1 if what == FORWARD else -1)
                most[chunk] = max(most.get(chunk, 0), live[chunk])
            assert in_flight(order) == most


def test_the_winner_is_priced_as_its_estimate() -> None:
    spec, machines = read_model(MODEL), cluster(16)
    speed = default_efficiency(machines.hardware.gpu)
    for price in fastest(spec, config(), machines, speed, global_batch=64, most=4):
        found = estimate(spec, price.config, hardware=machines)
        assert found.throughput is not None
        assert found.throughput.tokens_per_s == pytest.approx(price.tokens_per_s, rel=1e-9)
        assert found.peak.nbytes == price.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-70b", "mixtral-8x22b"])
def test_few_of_a_thousand_gpus_meshes_are_priced_in_full(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds leave a tenth of them; `benchmarks/speed/parallel_speed.py` has the seconds."""
    spec, machines = read_model(model), cluster(1024)
    speed = default_efficiency(machines.hardware.gpu)
    job, priced = config(sequence_length=4096), list[TrainConfig]()

    def counted(spec: ModelSpec, mesh: TrainConfig, *rest: Any) -> MeshPrice:
        priced.append(mesh)
        return price_mesh(spec, mesh, *rest)

    monkeypatch.setattr(searched, "price_mesh", counted)
    found = fastest(spec, job, machines, speed, global_batch=1024)
    assert found and found[0].parallel.world_size == 1024
    assert 0 < len(priced) <= len(meshes(spec, machines, job, global_batch=1024)) / 10


def test_a_batch_that_no_mesh_divides_is_one_line() -> None:
    with pytest.raises(InputError, match="no mesh of 16 GPUs of 7 samples"):
        meshes(read_model(MODEL), cluster(16), config(micro_batch_size=2), global_batch=7)
