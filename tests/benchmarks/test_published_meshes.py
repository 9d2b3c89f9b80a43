"""How published rows name meshes, machines and networks: by words that any table could use."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks" / "accuracy"))

from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.parallel_config import (
    ContextParallel,
    DataParallel,
    PipelineSchedule,
    Sharding,
)
from napkinmath.config.train_config import Attention
from napkinmath.timing.collectives import fabric
from published.architecture import completed_arch
from published.machines import machine_of, supplemented
from published.parallel import batch_of, cluster_of, spread_of
from published.predict import Outcome
from published.rows import Row, Unreadable
from published.understand import understand

BASE = {
    "row_id": "x",
    "source": "someone/some-tables: README",
    "model": "Llama-2-7B",
    "gpu": "A100-SXM4",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "method": "full",
    "precision": "bf16",
    "seq_len": "2048",
    "micro_batch": "1",
    "grad_accum": "8",
}


def row(**cells: str) -> Row:
    return Row({**BASE, **cells})


def mesh(sharding: str, gpus: int = 8, **cells: str) -> tuple[int, int, int, int, DataParallel]:
    parallel = understand(row(sharding=sharding, n_gpus=str(gpus), **cells)).config.parallel
    degrees = (
        parallel.data_parallel_size,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
    )
    assert parallel.world_size == gpus
    return (*degrees, parallel.data_parallel)


@pytest.mark.parametrize(
    ("text", "gpus", "wanted"),
    [
        ("fsdp full", 8, (8, 1, 1, 1, DataParallel.FSDP1)),
        ("FSDP2 (fully_shard)", 8, (8, 1, 1, 1, DataParallel.FSDP2)),
        ("ddp", 4, (4, 1, 1, 1, DataParallel.DDP)),
        ("", 2, (2, 1, 1, 1, DataParallel.DDP)),
        ("deepspeed zero-3", 8, (8, 1, 1, 1, DataParallel.ZERO3)),
        ("ZeRO stage 2", 8, (8, 1, 1, 1, DataParallel.ZERO2)),
        ("tp8 pp12 dp4 zero1", 384, (4, 8, 12, 1, DataParallel.ZERO1)),
        ("TP=4, PP=2, DP=8", 64, (8, 4, 2, 1, DataParallel.DDP)),
        ("tp2 pp6 dp32 zero1", 384, (32, 2, 6, 1, DataParallel.ZERO1)),
        ("fsdp2 dp2 cp4", 8, (2, 1, 1, 4, DataParallel.FSDP2)),
        ("fsdp2 dp8 tp8", 64, (8, 8, 1, 1, DataParallel.FSDP2)),
        ("tp8 distributed optimizer", 64, (8, 8, 1, 1, DataParallel.ZERO1)),
        ("4-way tp", 8, (2, 4, 1, 1, DataParallel.DDP)),
    ],
)
def test_degrees_and_engines_are_read(
    text: str, gpus: int, wanted: tuple[int, int, int, int, DataParallel]
) -> None:
    assert mesh(text, gpus, arch="L48 h4096 a32 ffn16384 V50304", model="some GPT") == wanted


def test_strategies_schedules_and_kinds_are_read() -> None:
    assert (
        understand(row(sharding="ddp (FSDP NO_SHARD)", n_gpus="2")).config.parallel.sharding
        is Sharding.NO_SHARD
    )
    assert (
        understand(row(sharding="fsdp hybrid_shard", n_gpus="16")).config.parallel.sharding
        is Sharding.HYBRID
    )
    assert (
        understand(row(sharding="fsdp shard_grad_op")).config.parallel.sharding is Sharding.GRAD_OP
    )
    naive = understand(
        row(sharding="naive model parallel (device_map)", n_gpus="2")
    ).config.parallel
    assert (naive.pipeline_parallel_size, naive.pipeline_schedule) == (2, PipelineSchedule.NAIVE)
    virtual = understand(row(sharding="pp4 interleaved 2", n_gpus="4")).config.parallel
    assert (virtual.pipeline_schedule, virtual.virtual_pipeline_size) == (
        PipelineSchedule.INTERLEAVED,
        2,
    )
    assert (
        understand(row(sharding="zero3 sp4", n_gpus="8")).config.parallel.context_parallel
        is ContextParallel.ULYSSES
    )


def test_offload_under_fsdp_takes_parameters_and_optimizer_together() -> None:
    offload = understand(
        row(sharding="fsdp full", offload="cpu params", n_gpus="2", method="qlora", precision="nf4")
    ).config.offload
    assert offload.parameters and offload.optimizer


def test_an_unnamed_zero_stage_is_the_lowest_that_fits() -> None:
    fits = understand(row(sharding="deepspeed", n_gpus="8"))
    assert (
        fits.config.parallel.data_parallel is DataParallel.ZERO2
        and "ZeRO stage 2" in fits.assumed["stage"]
    )
    assert (
        understand(
            row(sharding="deepspeed", n_gpus="8", model="Llama-2-70B")
        ).config.parallel.data_parallel
        is DataParallel.ZERO3
    )


@pytest.mark.parametrize("text", ["tp3", "tp8 pp2 dp1", "tp0", "pp16"])
def test_meshes_that_do_not_multiply_up_are_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        understand(row(sharding=text))


@pytest.mark.parametrize(
    ("text", "kind", "per_gpu"),
    [
        ("1600 Gbps node-node interconnect (RoCE)", "roce", 200),
        ("config: intra-node 150 GB/s, inter-node 800 Gb/s", "ib-hdr", 100),
        ("3.2 Tbps InfiniBand network", "ib-hdr", 400),
        ("10 Gbit/s tcp network between nodes", "ethernet", 1.25),
    ],
)
def test_networks_are_read_from_notes(text: str, kind: str, per_gpu: float) -> None:
    assumed: dict[str, str] = {}
    given = row(n_gpus="32", notes=text)
    cluster = cluster_of(given, understand(row()).hardware, 32, assumed)
    assert cluster.network is not None and not assumed
    assert (cluster.network.kind, cluster.network.gbit_per_s_per_gpu) == (
        kind,
        pytest.approx(per_gpu),
    )


def test_machines_are_of_eight_unless_the_notes_say_otherwise() -> None:
    hardware = understand(row()).hardware
    assert cluster_of(row(n_gpus="24"), hardware, 24, {}).num_nodes == 3
    assert cluster_of(row(n_gpus="24", notes="4 GPUs per node"), hardware, 24, {}).num_nodes == 6
    assert cluster_of(row(n_gpus="6"), hardware, 6, {}).num_nodes == 1
    assert (
        cluster_of(
            row(gpu="RTX 3090 (no NVLink)", n_gpus="2"),
            understand(row(gpu="RTX 3090", n_gpus="1")).hardware,
            2,
            {},
        ).hardware.gpu.gpu_link
        is None
    )


def test_micro_batches_follow_from_the_global_batch() -> None:
    given = row(
        sharding="tp8 pp2 dp4 zero1", n_gpus="64", micro_batch="", grad_accum="", global_batch="128"
    )
    job = understand(row())
    spread = spread_of(given, job.hardware, job.spec, job.config, job.era, {})
    assert batch_of(given, spread.parallel, 2048, {}) == (1, 32)
    tokens = row(sharding="ddp", micro_batch="2", grad_accum="", global_batch="1M tokens")
    assert batch_of(tokens, understand(tokens).config.parallel, 2048, {}) == (2, 32)


def test_question_marks_in_an_architecture_are_filled_in() -> None:
    assumed: dict[str, str] = {}
    given = row(
        arch="L? h14400 a? ffn57600 V250k",
        params_b="200",
        sharding="tp8 pp10 dp4 zero1",
        method="pretrain",
    )
    assert completed_arch(given, assumed).startswith("L80 h14400 a120 ffn57600")
    assert set(assumed) == {"layers", "heads"}
    assert (
        completed_arch(row(arch="L32 h4096 a32 kv8 ffn14336 V32000"), {})
        == "L32 h4096 a32 kv8 ffn14336 V32000"
    )


def test_machines_that_a_source_describes_are_read_unless_blind() -> None:
    cells = dict(source="bigscience-workshop/bigscience: notes", gpu="A100-SXM", n_gpus="384")
    machine = machine_of(row(**cells), blind=False)
    assert machine is not None and machine_of(row(**cells), blind=True) is None
    found = cluster_of(row(**cells), find_hardware("A100"), 384, {}, machine)
    assert (found.gpus_per_node, found.num_nodes) == (8, 48)
    assert found.network is not None and (found.network.kind, found.network.gbit_per_s_per_gpu) == (
        "omni-path",
        50,
    )
    servers = machine_of(
        row(source="QwenLM/Qwen: README.md", model="Qwen-7B", method="lora", n_gpus="4"),
        blind=False,
    )
    assert servers is not None and servers.gpus_per_node == 2
    assert (
        machine_of(
            row(source="QwenLM/Qwen: README.md", model="Qwen-72B", method="lora", n_gpus="4"),
            blind=False,
        )
        is None
    )


def test_a_slot_that_is_named_is_the_cards_own() -> None:
    def pair(gpu: str) -> float:
        return fabric(
            cluster_of(row(gpu=gpu, n_gpus="2"), find_hardware("RTX 4090"), 2, {}), 2
        ).bus_bytes_per_s

    assert pair("RTX4090 (PCIe4 x16)") == pytest.approx(2 * pair("RTX4090"))
    assert pair("RTX4090 (PCIe 3.0 x8)") == pytest.approx(pair("RTX4090") / 2)


def test_supplements_fill_what_is_empty_and_nothing_else() -> None:
    cells = dict(
        source="bigscience-workshop/bigscience: notes",
        model="GPT-200B",
        arch="L? h14400 a? ffn57600 V250k",
    )
    assert (
        "a96" in supplemented(row(**cells), blind=False)["arch"]
        and "a?" in supplemented(row(**cells), blind=True)["arch"]
    )
    own = dict(
        source="Dao-AILab/flash-attention: training/README.md", model="GPT3-1.3B", micro_batch=""
    )
    assert supplemented(row(**own), blind=False)["micro_batch"] == "8"
    assert supplemented(row(**{**own, "micro_batch": "2"}), blind=False)["micro_batch"] == "2"


def test_a_named_data_set_padded_to_the_longest_has_its_lengths() -> None:
    cells = dict(
        packed="no (Alpaca, max 512)",
        notes="padded-to-longest batches",
        seq_len="512",
        micro_batch="32",
        sharding="fsdp full",
        n_gpus="4",
    )
    padded = understand(row(**cells)).config
    assert (
        120 < sum(padded.batch.lengths) / len(padded.batch.lengths) < 135
        and max(padded.batch.lengths) == 512
    )
    assert not understand(row(**{**cells, "notes": ""})).config.batch.lengths
    assert not understand(row(**{**cells, "packed": "yes"})).config.batch.lengths


def test_tokens_of_padded_batches_are_counted_with_their_padding() -> None:
    cells = dict(
        packed="no (Alpaca)",
        seq_len="512",
        micro_batch="32",
        sharding="fsdp full",
        n_gpus="4",
        tokens_per_s_per_gpu="2000",
    )
    counted = (
        Outcome(understand(row(**cells, notes="padded-to-longest batches"))).speed()[0].predicted
    )
    full = Outcome(understand(row(**cells))).speed()[0].predicted
    assert 0.6 * full < counted < 0.95 * full  # ranks wait for the longest sequence of all four


def test_a_run_older_than_fused_attention_has_whole_scores() -> None:
    cells = dict(
        sharding="tp8", arch="L48 h4096 a32 ffn16384 V50304", model="some GPT", method="pretrain"
    )
    assert (
        understand(row(**cells, source="a/b: README (arXiv 2201.11990)")).config.attention
        is Attention.EAGER
    )
    assert (
        understand(row(**cells, source="a/b: README (arXiv 2401.11990)")).config.attention
        is Attention.AUTO
    )


# ---------------------------------------------------------------- words that were misread

GPT = {"arch": "L48 h4096 a32 ffn16384 V50304", "model": "some GPT"}


@pytest.mark.parametrize(
    ("cells", "field", "wanted"),
    [
        ({"sharding": "tp2 pp4 vp5 fsdp=0", "n_gpus": "32"}, "parallel.data_parallel", "ddp"),
        ({"sharding": "tp1 pp1 fsdp=False zero1=all"}, "parallel.data_parallel", "zero1"),
        ({"sharding": "fsdp=64", "n_gpus": "64"}, "parallel.data_parallel", "fsdp1"),
        ({"sharding": "hsdp", "n_gpus": "16"}, "parallel.sharding", "hybrid"),
        ({"sharding": "hsdp", "n_gpus": "16"}, "parallel.data_parallel", "fsdp1"),
        ({"sharding": "tp2 pp4 vp12", "n_gpus": "8"}, "parallel.virtual_pipeline_size", 12),
        ({"sharding": "pp4 interleave3"}, "parallel.virtual_pipeline_size", 3),
        ({"sharding": "pp4 interleave1"}, "parallel.pipeline_schedule", "1f1b"),
        ({"sharding": "pp4 interleaved1F1B"}, "parallel.pipeline_schedule", "interleaved"),
        ({"sharding": "tp2 pp4 dp1 fsdp="}, "parallel.data_parallel", "none"),
        ({"sharding": "tp2 pp4 fsdp", "n_gpus": "16"}, "parallel.data_parallel", "fsdp2"),
        ({"sharding": "pp4 vp32"}, "parallel.virtual_pipeline_size", 12),
        ({"notes": "mean ~210 tokens/sample", "n_gpus": "1"}, "batch.packing", False),
        ({"sharding": "pp4 vpNone"}, "parallel.virtual_pipeline_size", 1),
        ({"sharding": "tp2", "optimizer": "Adam (distributed)"}, "parallel.data_parallel", "zero1"),
        ({"sharding": "tp2", "optimizer": "Adam distributed"}, "parallel.data_parallel", "zero1"),
        ({"sharding": "tp2 pp2"}, "stack", "megatron"),
        ({"sharding": "fsdp full"}, "stack", "hf-4.45"),
        ({"sharding": "tp4", "attention": "TE/cuDNN flash"}, "attention", "auto"),
        ({"sharding": "tp4", "attention": "cuDNN flash"}, "attention", "cudnn"),
        ({"sharding": "tp4", "attention": "te flash2"}, "attention", "flash2"),
        (
            {"sharding": "tp4", "attention": "TE", "notes": "NeMo24.03.01"},
            "attention",
            "flash2",
        ),
        ({"sharding": "tp4", "attention": "TE", "notes": "NeMo25.04.rc2"}, "attention", "auto"),
        (
            {"sharding": "tp4", "checkpointing": "selective", "attention": "flash"},
            "recompute.kind",
            "none",
        ),
        (
            {"sharding": "tp4", "checkpointing": "selective", "attention": "eager"},
            "recompute.kind",
            "selective",
        ),
        ({"sharding": "fsdp", "checkpointing": "selective"}, "recompute.kind", "selective"),
        ({"sharding": "ddp", "precision": "bf16-mixed", "method": "lora"}, "precision", "bf16-amp"),
        ({"sharding": "ddp", "precision": "fp32 weights, bf16 autocast"}, "precision", "bf16-amp"),
        ({"sharding": "tp2", "precision": "bf16 (fp32 master)"}, "precision", "bf16"),
        ({"sharding": "fsdp", "notes": "fused linear CE"}, "loss", "fused"),
        ({"sharding": "fsdp", "notes": "cross-entropy fused with the LM head"}, "loss", "fused"),
        ({"sharding": "fsdp", "notes": "head and loss fused"}, "loss", "fused"),
        ({"sharding": "fsdp", "notes": "CE with chunked output"}, "loss", "chunked"),
        ({"sharding": "fsdp", "notes": "loss chunked over tokens"}, "loss", "chunked"),
        ({"sharding": "fsdp", "notes": "fused AdamW, plain loss"}, "loss", "hf"),
        ({"sharding": "fsdp", "notes": "no chunked loss"}, "loss", "hf"),
    ],
    ids=str,
)
def test_words_say_what_they_mean(cells: dict[str, str], field: str, wanted: object) -> None:
    value: object = understand(row(**{**GPT, **cells})).config
    for name in field.split("."):
        value = getattr(value, name)
    assert getattr(value, "value", value) == wanted


def test_a_local_batch_is_split_by_the_pipeline() -> None:
    config = understand(
        row(
            **GPT,
            source="pytorch/torchtitan: docs",
            sharding="fsdp2 dp2 pp4",
            micro_batch="16",
            grad_accum="1",
        )
    ).config
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (4, 4)


def test_a_row_without_a_length_is_priced_with_the_doubt() -> None:
    job = understand(row(**GPT, sharding="tp2 pp2", seq_len="", method="pretrain"))
    assert job.config.sequence_length == 4096 and "length" in job.assumed


def test_a_method_without_a_rule_has_memory_and_no_speed() -> None:
    outcome = Outcome(
        understand(row(n_gpus="1", method="VeRA", step_time_s="1", measured_peak_alloc_gb="20"))
    )
    assert outcome.memory()
    with pytest.raises(Unreadable, match="VeRA"):
        outcome.speed()


def test_a_mean_length_alone_makes_lengths() -> None:
    lengths = understand(row(n_gpus="1", notes="cap 768, mean ~210 tokens/sample")).config.batch
    assert sum(lengths.lengths) / len(lengths.lengths) == pytest.approx(210, rel=0.1)


def test_heads_that_are_not_said_are_shared_by_tensor_parallel_ranks() -> None:
    cells = {"arch": "L64 h13824 a? ffn55296 V250880", "params_b": "150", "sharding": "tp8 pp2"}
    spec = understand(row(model="GPT", n_gpus="16", **cells)).spec
    assert spec.num_layers == 64


@pytest.mark.parametrize(
    ("words", "engine", "syncs", "stack"),
    [
        ("torchtune", DataParallel.FSDP2, True, "torchtune"),
        ("InternEvo", DataParallel.FSDP1, True, "internevo"),
        ("the Trainer", DataParallel.FSDP1, False, "hf-4.48"),
    ],
)
def test_fsdp_is_of_the_generation_that_the_tool_has(
    words: str, engine: DataParallel, syncs: bool, stack: str
) -> None:
    config = understand(row(sharding="fsdp", notes=f"{words}, November 2024")).config
    assert config.parallel.data_parallel is engine
    assert (config.parallel.sync_each_batch, config.stack) == (syncs, stack)


def test_gradients_summed_in_a_named_type_and_zero_with_one_rank() -> None:
    summed = understand(row(sharding="tp4 dp2 zero1", precision="bf16 (fp32 grad accum)")).config
    assert summed.parallel.reduce_dtype == "fp32"
    alone = understand(row(sharding="tp8 dp1 zero1", notes="Megatron-DeepSpeed")).config
    assert alone.parallel.data_parallel is DataParallel.ZERO1


def test_memory_of_no_stated_kind_is_what_the_tools_log_prints() -> None:
    def figure(notes: str) -> tuple[float, Outcome]:
        cells = {"sharding": "fsdp", "mem_unit": "GB", "measured_unspecified_gb": "30"}
        outcome = Outcome(understand(row(notes=notes, **cells)))
        return outcome.memory()[0].predicted, outcome

    logged, outcome = figure("torchtune, November 2024")
    assert logged == pytest.approx(outcome.estimate.memory.allocated.value / 1e9)
    assert outcome.memory()[0].high * 1e9 >= outcome.estimate.memory.device.high
    shown, outcome = figure("torchtune, November 2024, nvidia-smi")
    assert shown == pytest.approx(outcome.estimate.memory.device.value / 1e9)
