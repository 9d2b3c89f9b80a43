"""Every flag does what it says: it is accepted, and it changes the one thing it names."""

from __future__ import annotations

import json

import pytest
from cli.runs import TINY, run
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.cli.flag_rows import SWITCH
from napkinmath.cli.flags import OUTPUT, SHARED
from napkinmath.cli.main import main
from napkinmath.cli.parser import Parser
from napkinmath.config.data_loader import DataLoaderConfig
from napkinmath.config.parallel_config import (
    ContextParallel,
    DataParallel,
    ParallelConfig,
    PipelineSchedule,
    Sharding,
    ZeroConfig,
)
from napkinmath.config.run_length import RunLength
from napkinmath.config.train_config import (
    AUTO_TILES,
    AdapterConfig,
    AdapterKind,
    Attention,
    Batch,
    Kernels,
    Loss,
    OffloadConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import (
    Placement,
    RolloutOffload,
    RolloutSync,
    Workload,
    WorkloadKind,
)
from napkinmath.inputs.hardware_options import allocator_text, machines
from napkinmath.inputs.method_options import METHODS
from napkinmath.inputs.model_options import model_spec
from napkinmath.inputs.option_table.flag_words import in_flags
from napkinmath.inputs.options import train_config

PARSER = Parser("estimate", "", SHARED)

# (command line, path of a TrainConfig field, value)
EFFECTS: list[tuple[str, str, object]] = [
    ("--full", "adapter", None),
    ("--samples 100", "run.samples", 100),
    ("--samples 100 --epochs 2.5", "run.epochs", 2.5),
    ("--max-steps 7", "run.max_steps", 7),
    ("--samples-per-s-per-worker 40", "loader.samples_per_s", 40.0),
    ("--dataloader-workers 4", "loader.workers", 4),
    ("--lora", "adapter.kind", AdapterKind.LORA),
    ("--lora", "quantization", None),
    ("--qlora", "quantization.format", "nf4"),
    ("--qlora", "quantization.double_quant", True),
    ("--qlora", "quantization.kbit_preparation", True),
    ("--qlora", "recompute.kind", RecomputeKind.FULL),
    ("--lora", "recompute.kind", RecomputeKind.NONE),
    ("--lora --quant int8", "recompute.kind", RecomputeKind.FULL),
    ("--method dora", "adapter.kind", AdapterKind.DORA),
    ("--method QDoRA", "quantization.format", "nf4"),
    ("--method qa-lora", "quantization.format", "gptq-int4"),
    ("--method ia3", "adapter.kind", AdapterKind.IA3),
    ("--method prefix", "adapter.kind", AdapterKind.PREFIX),
    ("--method pretrain", "adapter", None),
    ("--lora --rank 64", "adapter.rank", 64),
    ("--workload dpo", "workload.kind", WorkloadKind.DPO),
    ("--workload dpo --bs 4", "micro_batch_size", 8),
    ("--workload dpo --no-reference", "workload.reference", False),
    ("--workload grpo --old-logprobs", "workload.old_logprobs", True),
    (
        "--workload grpo --rollout hf --rollout-trainer verl --entropy-loss",
        "workload.entropy_loss",
        True,
    ),
    ("--workload grpo --score-bs 4", "workload.scored_rows", 4),
    ("--workload contrastive --columns 3", "workload.columns", 3),
    ("--workload distill --teacher llama-7b", "workload.teacher", "llama-7b"),
    ("--workload dpo --reference-at apart", "workload.reference_at", Placement.APART),
    (
        "--workload distill --teacher llama-7b --teacher-at sharded",
        "workload.teacher_at",
        Placement.SHARDED,
    ),
    ("--workload distill --teacher llama-7b --teacher-topk 64", "workload.teacher_topk", 64),
    ("--workload grpo --completion 1k", "workload.completion_tokens", 1024),
    ("--workload grpo --rollout vllm", "workload.rollout", "vllm"),
    ("--workload grpo --rollout vllm --rollout-memory 0.4", "workload.rollout_memory", 0.4),
    ("--workload grpo --rollout vllm --rollout-tp 2", "workload.rollout_tp", 2),
    ("--workload grpo --rollout vllm --rollout-sleep 2", "workload.rollout_sleep", 2),
    ("--workload grpo --rollout vllm --rollout-gpus 2xH100", "workload.rollout_gpus", "2xH100"),
    ("--workload grpo --rollout-trainer nemo-rl", "workload.rollout_trainer", "nemo-rl"),
    (
        "--workload grpo --rollout vllm --rollout-sync bucket",
        "workload.rollout_sync",
        RolloutSync.BUCKET,
    ),
    ("--workload grpo --rollout vllm --rollout-batches 4", "workload.rollout_batches", 4),
    ("--workload grpo --rollout vllm --rollout-bucket 1GiB", "workload.rollout_bucket", 1 << 30),
    (
        "--workload grpo --rollout vllm --rollout-offload policy",
        "workload.rollout_offload",
        RolloutOffload.POLICY,
    ),
    (
        "--workload grpo --rollout vllm --rollout-gpus 2xH100 --rollout-staleness 1",
        "workload.rollout_staleness",
        1,
    ),
    ("--workload grpo --rollout vllm --rollout-group 8", "workload.rollout_group", 8),
    ("--workload grpo --rollout vllm --rollout-draft 3:0.7", "workload.rollout_draft", (3, 0.7)),
    ("--eval-bs 8", "workload.eval_batch", 8),
    ("--generate 128", "workload.generate_tokens", 128),
    ("--lora -r 8", "adapter.rank", 8),
    ("--lora --alpha 32", "adapter.alpha", 32),
    ("--lora --targets q_proj,v_proj", "adapter.targets", ("q_proj", "v_proj")),
    ("--lora --targets all", "adapter.targets", ("all-linear",)),
    ("--lora --dropout 0.05", "adapter.dropout", 0.05),
    ("--lora --adapter-dtype bfloat16", "adapter.dtype", "bf16"),
    ("--lora --rslora", "adapter.rank_stabilized", True),
    ("--lora --no-rslora", "adapter.rank_stabilized", False),
    ("--lora --merge", "adapter.merge", True),
    ("--lora --no-merge", "adapter.merge", False),
    (
        "--lora --train-modules embed_tokens,lm_head",
        "adapter.trained_modules",
        ("embed_tokens", "lm_head"),
    ),
    ("--lora --adapters 4", "adapter.num_adapters", 4),
    ("--method prompt --virtual-tokens 8", "adapter.num_virtual_tokens", 8),
    ("--freeze embed_tokens", "frozen", ("embed_tokens",)),
    ("--qlora --quant fp4", "quantization.format", "fp4"),
    ("--lora --quant hqq", "quantization.format", "hqq-int4"),
    ("--lora --quant none", "quantization", None),
    ("--qlora --quantize-experts", "quantization.experts", True),
    ("--qlora --no-double-quant", "quantization.double_quant", False),
    ("--qlora --kernels napkinmath --quant-embeddings int8", "quantization.embeddings", "int8"),
    ("--lora --quant gptq --group-size 64", "quantization.group_size", 64),
    ("--qlora --no-kbit", "quantization.kbit_preparation", False),
    ("--qlora --quant-compute-dtype fp32", "quantization.compute_dtype", "fp32"),
    ("--qlora --keep-modules lm_head,router", "quantization.keep", ("lm_head", "router")),
    ("--bs 4", "micro_batch_size", 4),
    ("-b 4", "micro_batch_size", 4),
    ("--micro-batch-size=4", "micro_batch_size", 4),
    ("--ctx 4k", "sequence_length", 4096),
    ("--seq-len 512", "sequence_length", 512),
    ("--grad-accum 8", "gradient_accumulation_steps", 8),
    ("--gradient-accumulation-steps 8", "gradient_accumulation_steps", 8),
    ("--gpus 8 --bs 2 --global-batch 64", "gradient_accumulation_steps", 4),
    ("--global-batch-size 6", "gradient_accumulation_steps", 6),
    ("--target-ctx 256", "batch.target_length", 256),
    ("--packing", "batch.packing", True),
    ("--lengths 100,2k,300", "batch.lengths", (100, 2048, 300)),
    ("--precision bf16-amp", "precision", Precision.BF16_AMP),
    ("--precision float32", "precision", Precision.FP32),
    ("--precision FP8_BLOCK", "precision", Precision.FP8_BLOCK),
    ("--optimizer adamw_torch_fused", "optimizer", "adamw-fused"),
    ("--optimizer paged_adamw_8bit", "optimizer", "paged-adamw-8bit"),
    ("--optimizer auto", "optimizer", "auto"),
    ("--optimizer-in-backward", "optimizer_in_backward", True),
    ("--no-clip", "clip_gradients", False),
    ("--checkpointing full", "recompute.kind", RecomputeKind.FULL),
    ("--checkpointing every:4", "recompute.every", 4),
    ("--checkpointing interleaved:2", "recompute.kind", RecomputeKind.INTERLEAVED),
    ("--checkpointing interleaved:2", "recompute.every", 2),
    ("--checkpointing sqrt", "recompute.kind", RecomputeKind.SQRT),
    ("--checkpointing selective:sdpa,linear", "recompute.keep", ("sdpa", "linear")),
    ("--checkpointing offload", "offload.checkpoints", True),
    ("--lora --kernels napkinmath --offload embeddings", "offload.embeddings", True),
    ("--checkpointing offload", "recompute.kind", RecomputeKind.FULL),
    ("--qlora --checkpointing none", "recompute.kind", RecomputeKind.NONE),
    ("--checkpointing full --reentrant", "recompute.reentrant", True),
    ("--offload optimizer,activations", "offload.optimizer", True),
    ("--offload optimizer,activations", "offload.activations", True),
    ("--lora --offload params", "offload.parameters", True),
    ("--offload optimizer --no-pinned", "offload.pinned", False),
    ("--checkpointing offload --no-pinned", "offload.pinned", False),
    ("--offload activations --offload-style save-on-cpu", "offload.style", "save_on_cpu"),
    ("--lora --blocks-to-swap 3", "offload.blocks", 3),
    ("--frames 33", "batch.frames", 33),
    ("--lora --offload parameters --prefetch 0", "offload.prefetch", 0),
    ("--images 3", "batch.images", 3),
    ("--image 640x480", "batch.image_size", (640, 480)),
    ("--images 1 --min-pixels 5000", "batch.min_pixels", 5000),
    ("--images 1 --max-pixels 5000", "batch.max_pixels", 5000),
    ("--images 1 --image-limit 5000", "batch.image_limit", 5000),
    ("--attention eager", "attention", Attention.EAGER),
    ("--attention flash_attention_2", "attention", Attention.FLASH2),
    ("--loss chunked", "loss", Loss.CHUNKED),
    ("--kernels liger", "kernels", Kernels.LIGER),
    ("--kernels liger --kernel-parts norm,rope", "kernel_parts", ("norm", "rope")),
    ("--mlp-tiles 4", "mlp_tiles", 4),
    ("--mlp-tiles auto", "mlp_tiles", AUTO_TILES),
    ("--stack hf-2024", "stack", "hf-2024"),
    ("--eval", "training_mode", False),
    ("--train-mode", "training_mode", True),
    ("--compile", "compile", True),
    ("--qlora --quant-storage uint8", "quantization.storage", "uint8"),
    ("--gpus 8", "parallel.data_parallel_size", 8),
    ("--gpus 8", "parallel.data_parallel", DataParallel.DDP),
    ("--gpus 16 --nodes 2 --fsdp", "parallel.data_parallel", DataParallel.FSDP2),
    ("--gpus 8 --ddp", "parallel.data_parallel", DataParallel.DDP),
    ("--gpus 8 --zero 2", "parallel.data_parallel", DataParallel.ZERO2),
    ("--gpus 8 --data-parallel fsdp1", "parallel.data_parallel", DataParallel.FSDP1),
    ("--gpus 16 --tp 2 --pp 2 --cp 2 --fsdp", "parallel.data_parallel_size", 2),
    ("--gpus 16 --tp 2", "parallel.tensor_parallel_size", 2),
    ("--gpus 16 --tp 2", "parallel.sequence_parallel", True),
    ("--gpus 16 --tp 2 --no-sequence-parallel", "parallel.sequence_parallel", False),
    ("--gpus 16 --tp 2 --stack nemo --no-tp-comm-overlap", "parallel.tensor_overlap", False),
    ("--gpus 4 --pp 4", "parallel.pipeline_parallel_size", 4),
    ("--gpus 4 --pp 4 --pp-schedule gpipe", "parallel.pipeline_schedule", PipelineSchedule.GPIPE),
    (
        "--gpus 4 --pp 4 --pp-schedule interleaved --pp-chunks 2",
        "parallel.virtual_pipeline_size",
        2,
    ),
    ("--gpus 4 --pp 4 --micro-batches 16", "parallel.num_micro_batches", 16),
    ("--gpus 4 --cp 4", "parallel.context_parallel_size", 4),
    ("--gpus 4 --cp 4 --cp-kind ulysses", "parallel.context_parallel", ContextParallel.ULYSSES),
    ("--gpus 8 --ep 4", "parallel.expert_parallel_size", 4),
    ("--gpus 8 --tp 2 --ep 8 --etp 1", "parallel.expert_tensor_parallel_size", 1),
    ("--gpus 8 --ep 4 --ep-comm-overlap", "parallel.expert_overlap", True),
    ("--gpus 8 --ep 4 --ep-all-gather", "parallel.expert_tokens_gathered", True),
    ("--gpus 8 --ep 4 --deepep", "parallel.expert_tokens_once", True),
    ("--gpus 8 --ep 4 --expert-imbalance 1.5", "parallel.expert_imbalance", 1.5),
    ("--gpus 8 --ep 4 --expert-capacity 1.25", "parallel.expert_capacity", 1.25),
    ("--gpus 8 --fsdp --sharding grad-op", "parallel.sharding", Sharding.GRAD_OP),
    ("--gpus 8 --fsdp --sharding hybrid --shard-size 4", "parallel.shard_size", 4),
    ("--gpus 8 --fsdp --no-reshard", "parallel.reshard_after_forward", False),
    ("--gpus 8 --fsdp --wrap none", "parallel.wrap", "none"),
    ("--gpus 8 --data-parallel fsdp1 --forward-prefetch", "parallel.forward_prefetch", True),
    ("--gpus 8 --data-parallel fsdp1 --no-backward-prefetch", "parallel.backward_prefetch", False),
    ("--gpus 8 --data-parallel fsdp1 --no-limit-all-gathers", "parallel.limit_all_gathers", False),
    ("--gpus 8 --fsdp --sharded-dtype bfloat16", "parallel.sharded_dtype", "bf16"),
    ("--gpus 8 --fsdp --reduce-dtype fp32", "parallel.reduce_dtype", "fp32"),
    ("--gpus 8 --fsdp --sync-each-batch", "parallel.sync_each_batch", True),
    ("--gpus 8 --bucket-mb 100", "parallel.bucket_mb", 100),
    ("--gpus 8 --bucket-view", "parallel.gradient_as_bucket_view", True),
    ("--gpus 8 --zero 3 --hpz 4", "parallel.zero", ZeroConfig(hpz_partition_size=4)),
    ("--gpus 8 --zero 3 --mics 4", "parallel.zero", ZeroConfig(mics_shard_size=4)),
    ("--gpus 8 --zero 3 --offload optimizer --nvme optimizer", "parallel.nvme", ("optimizer",)),
    ("--gpus 8 --pp 2 --vpp 4", "parallel.pipeline_schedule", PipelineSchedule.INTERLEAVED),
    ("--gpus 8 --fsdp --stack torchtitan", "parallel.sharded_dtype", "fp32"),
    ("--gpus 8 --fsdp --stack olmo --precision fp8", "parallel.reduce_dtype", "fp32"),
    ("--gpus 8 --fsdp --stack torchtitan", "precision", Precision.BF16),
    ("--gpus 8 --fsdp --stack torchtitan --sharded-dtype bf16", "parallel.sharded_dtype", "bf16"),
    ("--gpus 8 --stack llm-foundry", "precision", Precision.BF16_AMP),
    ("--gpus 8 --fsdp --broadcast-loading", "parallel.broadcast_loading", True),
    ("--gpus 8 --fsdp --full-state-dict", "parallel.full_state_dict", True),
]
COVERED_ELSEWHERE = {row[0][0] for row in (*dict(SHARED)["model"], *OUTPUT)} | {
    "--gpu",
    "--resident",
    "--audio",  # tests/agreement/test_sounds.py
    "--network",
    "--host-ram",
    "--host",
    "--vram",
    "--mig",
    "--power-limit",
    "--display",
    "--allocator",
    "--calibration",
    "--allow-stale-calibration",
}


def parse(line: str) -> dict[str, object]:
    """The options of a command line given as one text."""
    return PARSER.parse(line.split())


def field_of(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("line", "path", "value"), EFFECTS, ids=[f"{line} {path}" for line, path, _ in EFFECTS]
)
def test_flag_sets_its_field(line: str, path: str, value: object) -> None:
    assert field_of(train_config(parse(line)), path) == value


def fields_of(kind: type[Record], prefix: str = "") -> set[str]:
    """Paths of a record's fields, those of its sub-records spelled out."""
    parts = {
        "adapter": AdapterConfig,
        "quantization": QuantizationConfig,
        "recompute": RecomputeConfig,
        "offload": OffloadConfig,
        "batch": Batch,
        "parallel": ParallelConfig,
        "workload": Workload,
        "run": RunLength,
        "loader": DataLoaderConfig,
    }
    found: set[str] = set()
    for name in kind.__record_fields__:
        found |= (
            fields_of(parts[name], f"{name}.")
            if kind is TrainConfig and name in parts
            else {prefix + name}
        )
    return found


def test_every_knob_is_reachable() -> None:
    assert fields_of(TrainConfig) <= {path for _, path, _ in EFFECTS}


def test_every_flag_is_tested() -> None:
    given = {
        word.partition("=")[0]
        for line, _, _ in EFFECTS
        for word in line.split()
        if word.startswith("--")
    }
    for _, rows in SHARED:
        for flags, kind, _, _ in rows:
            names = {*flags, *({"--no-" + flags[0][2:]} if kind == SWITCH else set())}
            assert names & (given | COVERED_ELSEWHERE), flags


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_priced(method: str) -> None:
    done = run(*TINY, "--method", method, "--json")
    assert done.code == 0, done.err
    json.loads(done.out)


@pytest.mark.parametrize(
    ("line", "name", "gib"),
    [
        ("--gpu 4090", "RTX 4090", 23.0),
        ("--gpus 1xT4", "T4", 14.0),
        ("--gpus 1 --nodes 1 --gpu h100", "H100", 79.0),
        ("--vram 40GiB", "40 GiB", 40.0),
    ],
)
def test_hardware_flags(line: str, name: str, gib: float) -> None:
    (machine,) = machines(parse(line))
    assert machine is not None and name.lower() in machine.gpu.name.lower()
    assert abs(machine.memory_bytes / 2**30 - gib) < 1.5


def test_mig_vram_and_display() -> None:
    (part,) = machines(parse("--gpu A100-80 --mig 3g.40gb"))
    (whole,) = machines(parse("--gpu A100-80"))
    assert part is not None and whole is not None and part.memory_bytes < 0.55 * whole.memory_bytes
    (small,) = machines(parse("--gpu A100-80 --vram 10"))
    assert small is not None and small.memory_bytes == 10 * 2**30
    held = [
        machines(parse(f"--gpu 4090 --display {kind}"))[0] for kind in ("none", "linux", "windows")
    ]
    usable = [machine.usable_bytes for machine in held if machine is not None]
    assert usable == sorted(usable, reverse=True) and len(set(usable)) == 3


def test_repeated_gpu_compares() -> None:
    assert [m.gpu.name for m in machines(parse("--gpu T4 --gpu 4090")) if m] == ["T4", "RTX 4090"]
    done = run(*TINY, "--gpu", "T4", "--gpu", "4090", "--json")
    assert done.code == 0 and len(json.loads(done.out)) == 2


def test_allocator_text_reaches_the_replay() -> None:
    assert (
        allocator_text(PARSER.parse(["--allocator", "expandable_segments:True"]))
        == "expandable_segments:True"
    )
    assert (
        run(*TINY, "--allocator", "expandable_segments:True,roundup_power2_divisions:4").code == 0
    )


def test_model_flags() -> None:
    notes: list[str] = []
    assert model_spec({"model": "llama-7b"}, notes).name == "llama-7b" and not notes
    assert model_spec({"model": "huggyllama/Llama_7B"}, notes).name == "llama-7b" and notes
    assert model_spec({"arch": "L2 h64 a4 f128 v100"}, notes).num_layers == 2
    with pytest.raises(InputError, match="no model was named"):
        model_spec({}, notes)


def test_value_that_looks_like_a_flag_is_not_swallowed() -> None:
    with pytest.raises(InputError, match="needs a value, but '--lora' follows"):
        PARSER.parse(["--model", "--lora"])


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--optimizer Paged-AdamW-32bit", "--optimizer paged_adamw_32bit"),
        ("--lora --quant load_in_8bit", "--lora --quant int8"),
        ("--lora --qlora", "--qlora"),
        ("--loss CCE", "--loss fused"),
        ("--checkpointing unsloth", "--checkpointing offload"),
        ("--gpu A100-80G", "--gpu A100-SXM4-80GB"),
        ("--gpus 8*H100", "--gpus 8xh100"),
        ("--gpus h100:8", "--gpus 8xh100"),
    ],
)
def test_a_name_is_read_as_people_write_it(words: str, same: str) -> None:
    said, meant = (run(*TINY, *each.split(), "--json") for each in (words, same))
    assert said.code == meant.code != 2 and said.out == meant.out


def test_gpus_begin_with_their_number() -> None:
    said = run(*TINY, "--gpus", "rtx4090")
    assert said.code == 2 and "'rtx4090' does not begin with a number" in said.err


def test_same_value_twice_is_no_contradiction() -> None:
    assert parse("--bs 4 --bs 4 --packing --packing") == {"bs": "4", "packing": True}


def test_double_dash_ends_the_flags() -> None:
    parser = Parser("x", "", (), positional=("job", "JOB", ""))
    assert parser.parse(["--", "--odd-name.yaml"]) == {"job": "--odd-name.yaml"}


@pytest.mark.parametrize(
    ("message", "worded"),
    [
        (
            "virtual_pipeline_size=8 needs pipeline_schedule zbv",
            "--pp-chunks 8 needs --pp-schedule zbv",
        ),
        ("set sequence_parallel=False", "set --no-sequence-parallel"),
        ("'tensor_parallel_size' of num_experts=8", "'tensor_parallel_size' of num_experts=8"),
        ("model.tensor_parallel_size is 2", "model.tensor_parallel_size is 2"),
    ],
)
def test_a_message_names_flags(message: str, worded: str) -> None:
    assert in_flags(message) == worded


def test_a_refusal_on_the_command_line_names_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixtral-8x7b", "--full", "--gpus", "8xh100", "--ep", "3"]) == 2
    assert capsys.readouterr().err.startswith("estimate: --ep 3 does not divide")
