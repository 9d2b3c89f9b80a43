"""Throughput of several GPUs: pipelines, stragglers, scaling, money, and the studies that the field
started from."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath import TrainConfig, estimate
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.gpus import find_hardware
from napkinmath.cli.main import main
from napkinmath.config.cluster import Cluster, NetworkLink
from napkinmath.config.hardware import HostLink
from napkinmath.config.parallel_config import (
    DataParallel,
    ParallelConfig,
    PipelineSchedule,
    Sharding,
)
from napkinmath.config.train_config import (
    AdapterConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
)
from napkinmath.estimate import Estimate
from napkinmath.ir.costs import Collective
from napkinmath.ir.step import STAGE_ENTRANCE
from napkinmath.memory import pipeline_ranks
from napkinmath.planning.scaling import scaling_curve
from napkinmath.timing.pipeline_time import waiting_s
from napkinmath.timing.stragglers import slowest_factor

FULL = RecomputeConfig(kind=RecomputeKind.FULL)


def cluster(gpu: str, gpus: int = 8, nodes: int = 1, network: NetworkLink | None = None) -> Cluster:
    return Cluster(
        hardware=find_hardware(gpu), gpus_per_node=gpus, num_nodes=nodes, network=network
    )


def config(parallel: ParallelConfig, **fields: object) -> TrainConfig:
    return TrainConfig(
        **{
            "sequence_length": 2048,
            "precision": Precision.BF16,
            "recompute": FULL,
            "parallel": parallel,
            **fields,
        }
    )


def fsdp(ranks: int, **fields: object) -> ParallelConfig:
    return ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=ranks, **fields)


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize(
    ("schedule", "chunks", "share"),
    # Share of a step of 8 micro-batches on 4 stages that a stage idles: (p - 1) / m of the busy
    # time, over v chunks.
    [
        (PipelineSchedule.GPIPE, 1, 3 / 8),
        (PipelineSchedule.ONE_F_ONE_B, 1, 3 / 8),
        (PipelineSchedule.INTERLEAVED, 2, 3 / 16),
        (PipelineSchedule.ZERO_BUBBLE, 1, 1 / 8),
        (PipelineSchedule.NAIVE, 1, 3.0),
    ],
)
def test_stages_wait_as_the_schedules_papers_say(
    schedule: PipelineSchedule, chunks: int, share: float
) -> None:
    assert waiting_s(schedule, 4, chunks, 8, 1.0) / 8.0 == pytest.approx(share)


def test_more_micro_batches_shrink_the_bubble() -> None:
    machines = cluster("A100", 4)
    mesh = ParallelConfig(pipeline_parallel_size=4)
    shares = [
        estimate(
            "llama-3.2-1b", config(mesh, gradient_accumulation_steps=steps), hardware=machines
        ).throughput.bubble_share  # type: ignore[union-attr]
        for steps in (4, 8, 32)
    ]
    assert shares == sorted(shares, reverse=True)
    assert (
        0.2 < shares[0] < 3 / 7
    )  # what equal stages would wait; here the head makes the last one slower


def test_megatrons_tensor_ranks_share_what_a_stage_passes_on() -> None:
    """Each of t tensor-parallel ranks sends a t-th between nodes, and they gather within: BLOOM's
    trials on 12 stages and 4 adapters a node."""
    machines = cluster("A100", 8, 2, NetworkLink(kind="omni-path", gbit_per_s_per_gpu=50))
    mesh = ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=2)

    def passed(stack: str) -> dict[str, float]:
        found = estimate(
            "llama-3.1-8b",
            config(mesh, gradient_accumulation_steps=4, stack=stack),
            hardware=machines,
        )
        step = found.ranks.step(1)
        costs = [
            c
            for run in step.runs
            if run.name == STAGE_ENTRANCE
            for op in run.block.ops
            for c in op.costs
            if isinstance(c, Collective)
        ]
        bind = Bindings({**dict(found.spec.symbols), "b": 1, "s": 2048})
        return {cost.kind: bind(cost.moved) for cost in costs}

    whole, parts = passed("hf"), passed("megatron")
    assert list(whole) == ["send"] and parts["send"] * 8 == parts["all-gather"] == whole["send"]


@pytest.mark.parametrize(
    "mesh",
    [
        ParallelConfig(
            data_parallel=DataParallel.ZERO1, data_parallel_size=2, pipeline_parallel_size=4
        ),
        fsdp(2, pipeline_parallel_size=4),
        fsdp(2, pipeline_parallel_size=4, reduce_dtype="fp32"),
        fsdp(
            2,
            pipeline_parallel_size=4,
            pipeline_schedule=PipelineSchedule.INTERLEAVED,
            virtual_pipeline_size=2,
            wrap="layer",
        ),
    ],
    ids=["zero1", "fsdp2", "fsdp2, sums in fp32", "fsdp2, interleaved"],
)
def test_engines_within_a_pipeline_keep_their_books(mesh: ParallelConfig) -> None:
    found = estimate(
        "llama-3.2-1b", config(mesh, gradient_accumulation_steps=8), hardware=cluster("A100")
    )
    held = [0] * len(found.timeline.tensors)
    for segment, _, action, index in found.timeline.events():
        if action == "=":
            old, new = segment.pairs[index]
            held[old] -= 1
            held[new] += 1
        elif action in "+-":
            held[index] += 1 if action == "+" else -1
            assert held[index] >= 0
    more = estimate(
        "llama-3.2-1b",
        config(mesh.replace(data_parallel_size=4), gradient_accumulation_steps=8),
        hardware=cluster("A100", 8, 2),
    )
    assert more.peak.nbytes < found.peak.nbytes  # states are shared by more ranks


def test_engines_that_do_not_go_with_pipelines_say_so() -> None:
    mesh = ParallelConfig(
        data_parallel=DataParallel.ZERO3, data_parallel_size=2, pipeline_parallel_size=4
    )
    with pytest.raises(InputError, match="within a pipeline: no engine runs it"):
        estimate(
            "llama-3.2-1b", config(mesh, gradient_accumulation_steps=8), hardware=cluster("A100")
        )


def test_changes_are_priced_on_the_cluster_and_for_its_worst_rank() -> None:
    mesh = ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4)
    found = estimate(
        "llama-3.1-70b",
        config(mesh, recompute=RecomputeConfig(), gradient_accumulation_steps=8),
        hardware=cluster("H100", 8, 4),
    )
    changes = {change.flag: change for change in found.changes}
    assert changes["--checkpointing full"].speed_ratio == pytest.approx(
        estimate(
            "llama-3.1-70b",
            config(mesh, gradient_accumulation_steps=8),
            hardware=cluster("H100", 8, 4),
        ).time.tokens_per_s  # type: ignore[union-attr]
        / found.time.tokens_per_s  # type: ignore[union-attr]
    )
    eight_bit = estimate(
        "llama-3.1-70b",
        found.config.replace(optimizer="adamw-8bit"),
        hardware=cluster("H100", 8, 4),
    )
    assert (
        found.peak.nbytes - eight_bit.peak.nbytes == changes["--optimizer adamw-8bit"].saved_bytes
    )


def test_a_middle_stage_still_trains_on_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--model",
            "llama-3.1-405b",
            "--gpus",
            "128xH100",
            "--tp",
            "8",
            "--pp",
            "16",
            "--grad-accum",
            "16",
            "--ctx",
            "8192",
        ]
    )
    assert "batch 1 x 8192, 16 micro-steps" in capsys.readouterr().out


# ---------------------------------------------------------------- many GPUs


def test_the_slowest_of_more_is_slower() -> None:
    factors = [slowest_factor(n) for n in (1, 2, 8, 512, 16384)]
    assert factors[0] == 1.0 and factors == sorted(factors) and factors[-1] < 1.12


def test_slower_networks_expose_more_communication() -> None:
    mesh = fsdp(16)
    found = [
        estimate(
            "llama-3.1-8b",
            config(mesh),
            hardware=cluster("A100", 8, 2, NetworkLink(kind=kind, gbit_per_s_per_gpu=rate)),
        ).throughput
        for kind, rate in (("ib-ndr", 400), ("ib-hdr", 200), ("roce", 50), ("ethernet", 1.25))
    ]
    shares = [t.communication_share for t in found if t is not None]
    assert shares == sorted(shares) and shares[0] < 0.2 and shares[-1] > 0.8


def test_a_scaling_curve_bends_down() -> None:
    curve = scaling_curve("llama-3.1-8b", config(fsdp(8)), cluster("A100"), [8, 16, 64, 512])
    assert [t.gpus for t in curve] == [8, 16, 64, 512]
    per_gpu = [t.tokens_per_s_per_gpu for t in curve]
    assert per_gpu == sorted(per_gpu, reverse=True)
    totals = [t.tokens_per_s for t in curve]
    assert totals == sorted(totals)


def test_a_shared_batch_scales_worse_than_a_growing_one() -> None:
    machines = cluster("A100")
    base = config(
        ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=8),
        gradient_accumulation_steps=8,
    )
    weak = scaling_curve("llama-3.2-1b", base, machines, [64])[0]
    strong = scaling_curve("llama-3.2-1b", base, machines, [64], global_batch=64)[0]
    assert strong.tokens_per_s < weak.tokens_per_s


@pytest.mark.parametrize(
    ("gpus", "batch", "message"),
    [(12, 0, "whole nodes"), (0, 0, "whole replicas"), (16, 24, "not shared evenly")],
)
def test_impossible_curves_are_refused(gpus: int, batch: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scaling_curve("llama-3.2-1b", config(fsdp(8)), cluster("A100"), [gpus], global_batch=batch)


def test_hybrid_sharding_keeps_gathers_on_the_node() -> None:
    slow = NetworkLink(kind="roce", gbit_per_s_per_gpu=25)
    full = estimate(
        "llama-3.1-8b", config(fsdp(16)), hardware=cluster("A100", 8, 2, slow)
    ).throughput
    hybrid = estimate(
        "llama-3.1-8b",
        config(fsdp(16, sharding=Sharding.HYBRID)),
        hardware=cluster("A100", 8, 2, slow),
    ).throughput
    assert (
        full is not None
        and hybrid is not None
        and hybrid.communication_share < full.communication_share
    )


def test_sixteen_thousand_gpus_are_priced_by_few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = pipeline_ranks.build_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        built.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr(pipeline_ranks, "build_step", counted)
    mesh = ParallelConfig(
        data_parallel=DataParallel.ZERO1,
        data_parallel_size=128,
        tensor_parallel_size=8,
        pipeline_parallel_size=16,
        sequence_parallel=True,
    )
    found = estimate(
        "llama-3.1-405b",
        config(mesh, gradient_accumulation_steps=64, sequence_length=8192),
        hardware=cluster("H100", 8, 2048),
    )
    assert found.throughput is not None and found.throughput.gpus == 16384
    assert 0 < found.memory.allocated.value < 80 << 30
    assert 0 < len(built) <= 16  # ranks of one pipeline, not of the cluster


# ---------------------------------------------------------------- money


def test_money_and_energy_follow_from_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate("llama-3.1-8b", config(fsdp(8)), hardware=cluster("H100")).throughput
    assert found is not None
    assert found.gpu_hours_per_billion == pytest.approx(
        1e9 / found.tokens_per_s * found.gpus / 3600
    )
    assert found.price_per_billion(2.5) == pytest.approx(2.5 * found.gpu_hours_per_billion)
    assert (
        found.gpu_hours_per_billion * 0.7 < found.kwh_per_billion < found.gpu_hours_per_billion * 2
    )
    with pytest.raises(InputError, match="not a price"):
        found.price_per_billion(-1)
    assert (
        main(
            [
                "--model",
                "llama-3.1-8b",
                "--gpus",
                "8xH100",
                "--fsdp",
                "--price",
                "2.5",
                "--precision",
                "bf16",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "tokens/s on 8 GPUs" in out and "at 2.5 a GPU-hour" in out and "tokens/s a GPU" in out
    assert main(["--model", "llama-3.1-8b", "--gpu", "H100", "--price", "cheap"]) == 2


# ---------------------------------------------------------------- QLoRA with FSDP on two consumer cards and on H100
# AnswerDotAI/fsdp_qlora benchmarks_03_2024.md: seconds for 1,024 samples of 2,048 tokens (or 512), Llama-2-7B, rank 64 without o_proj.


def study(
    gpu: str,
    *,
    quantized: bool,
    batch: int,
    context: int = 2048,
    sharded: bool = True,
    lanes: int = 0,
) -> Estimate:
    hardware = find_hardware(gpu)
    if lanes:
        hardware = hardware.replace(
            gpu=hardware.gpu.replace(
                gpu_link=None, host_link=HostLink(kind="pcie", generation=3, lanes=lanes)
            )
        )
    mesh = (
        fsdp(2) if sharded else ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=2)
    )
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    return estimate(
        "llama-2-7b",
        TrainConfig(
            micro_batch_size=batch,
            sequence_length=context,
            precision=Precision.BF16,
            recompute=FULL,
            parallel=mesh,
            adapter=AdapterConfig(
                rank=64, targets=targets, dtype="base" if not quantized else "bf16"
            ),
            quantization=QuantizationConfig(kbit_preparation=False) if quantized else None,
        ),
        hardware=Cluster(hardware=hardware, gpus_per_node=2),
    )


def speed(found: Estimate) -> float:
    assert found.throughput is not None
    return found.throughput.tokens_per_s


def test_on_slow_links_quantization_and_large_batches_pay() -> None:
    """Measured on two RTX 3090 with slow slots: QLoRA 1 x 512 1,082 s, LoRA 2,597; 1 x 2048 1,564
    and 3,090; LoRA x6 1,199, QLoRA x10 936."""
    rig = dict(lanes=8)
    small = {q: study("RTX 3090", quantized=q, batch=1, **rig) for q in (True, False)}
    assert speed(small[True]) > 1.3 * speed(small[False])
    assert speed(study("RTX 3090", quantized=False, batch=6, **rig)) > 1.5 * speed(small[False])
    assert speed(study("RTX 3090", quantized=True, batch=10, **rig)) > speed(
        study("RTX 3090", quantized=False, batch=6, **rig)
    )
    reasons = {
        q: found.throughput.communication_share
        for q, found in small.items()
        if found.throughput is not None
    }
    assert (
        reasons[False] > 0.5 > 0.4 > reasons[True]
    )  # whole 16-bit weights cross the slot twice a step, 4-bit ones in a quarter of the time


def test_without_sharding_slow_links_hardly_matter() -> None:
    """LoRA x4 on the same rig: 881 s unsharded, 1,366 s sharded."""
    assert speed(
        study("RTX 3090", quantized=False, batch=4, sharded=False, lanes=8)
    ) > 1.05 * speed(study("RTX 3090", quantized=False, batch=4, lanes=8))


def test_on_fast_links_neither_does() -> None:
    lora, qlora = study("H100", quantized=False, batch=4), study("H100", quantized=True, batch=4)
    assert lora.throughput is not None and lora.throughput.communication_share < 0.1
    assert speed(lora) > speed(qlora)  # decoding is all that quantization adds


def test_seventy_billion_parameters_fit_two_cards_of_24_gb() -> None:
    """README of AnswerDotAI/fsdp_qlora: Llama-2-70B, QLoRA, parameters on the host, batch 2 x 2048:
    14.92 GiB reserved a card. Its loader, like transformers 4's, packs one weight at a time."""
    from napkinmath.config.train_config import OffloadConfig

    found = estimate(
        "llama-2-70b",
        TrainConfig(
            micro_batch_size=2,
            sequence_length=2048,
            precision=Precision.BF16,
            recompute=FULL,
            parallel=fsdp(2),
            adapter=AdapterConfig(rank=64, dtype="bf16"),
            quantization=QuantizationConfig(kbit_preparation=False),
            offload=OffloadConfig(parameters=True, optimizer=True),
            stack="hf-4.48",
        ),
        hardware=Cluster(hardware=find_hardware("RTX 3090"), gpus_per_node=2),
    )
    assert found.memory.device.value < 24 << 30
    assert 0.6 < found.memory.reserved.value / (14.92 * (1 << 30)) < 1.4
