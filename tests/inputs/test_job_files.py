"""Job files of every kind: what each becomes, and that what is assumed or ignored is said aloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.runs import run
from cli.test_flags import field_of
from napkinmath.base.errors import InputError
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.config.parallel_config import DataParallel, Sharding, ZeroConfig
from napkinmath.config.train_config import (
    AdapterKind,
    Attention,
    Kernels,
    Loss,
    Precision,
    RecomputeKind,
)
from napkinmath.inputs.job_file import read_job, with_job_file
from napkinmath.inputs.model_options import model_spec
from napkinmath.inputs.options import train_config

JOBS = Path(__file__).resolve().parents[1] / "cli" / "jobs"

# file -> (model's name, fields of the TrainConfig)
EXPECTED: dict[str, tuple[str, dict[str, object]]] = {
    "own.yaml": (
        "llama-7b",
        {
            "micro_batch_size": 4,
            "sequence_length": 4096,
            "gradient_accumulation_steps": 2,
            "adapter.rank": 32,
            "adapter.targets": ("q_proj", "v_proj"),
            "quantization.format": "nf4",
            "recompute.kind": RecomputeKind.EVERY,
            "recompute.every": 2,
            "batch.packing": True,
            "batch.lengths": (512, 1024),
            "optimizer": "paged-adamw-8bit",
        },
    ),
    "own.json": (
        "L2 h64 a4 kv2 f128 v256",
        {
            "micro_batch_size": 2,
            "recompute.kind": RecomputeKind.FULL,
            "clip_gradients": False,
            "adapter": None,
            "quantization": None,
        },
    ),
    "own_config.yaml": ("llama", {"sequence_length": 64, "training_mode": False}),
    "axolotl_qlora.yaml": (
        "llama-2-7b",
        {
            "micro_batch_size": 2,
            "sequence_length": 4096,
            "gradient_accumulation_steps": 4,
            "adapter.kind": AdapterKind.LORA,
            "adapter.rank": 32,
            "adapter.alpha": 16,
            "adapter.dropout": 0.05,
            "adapter.targets": ("all-linear",),
            "quantization.format": "nf4",
            "quantization.double_quant": True,
            "precision": Precision.BF16_AUTOCAST,
            "optimizer": "paged-adamw",
            "recompute.kind": RecomputeKind.FULL,
            "recompute.reentrant": True,
            "attention": Attention.FLASH2,
            "batch.packing": True,
        },
    ),
    "axolotl_full.yaml": (
        "llama-7b",
        {
            "adapter": None,
            "precision": Precision.BF16,
            "recompute.kind": RecomputeKind.FULL,
            "offload.checkpoints": True,
            "optimizer": "adamw-fused",
            "clip_gradients": False,
            "kernels": Kernels.LIGER,
            "loss": Loss.FUSED,
            "sequence_length": 8192,
        },
    ),
    "trl_qlora.yaml": (
        "llama-2-7b",
        {
            "micro_batch_size": 2,
            "sequence_length": 2048,
            "gradient_accumulation_steps": 8,
            "adapter.rank": 8,
            "adapter.dropout": 0.05,
            "adapter.targets": ("q_proj", "k_proj"),
            "adapter.trained_modules": ("lm_head",),
            "quantization.format": "fp4",
            "quantization.double_quant": False,
            "recompute.kind": RecomputeKind.NONE,
            "optimizer": "adamw-8bit",
            "precision": Precision.BF16_AUTOCAST,
            "attention": Attention.FLASH2,
            "batch.packing": True,
        },
    ),
    "trl_defaults.yaml": (
        "llama-7b",
        {
            "micro_batch_size": 8,
            "sequence_length": 1024,
            "adapter": None,
            "recompute.kind": RecomputeKind.FULL,
            "precision": Precision.BF16_AMP,
        },
    ),
    "trainer.json": (
        "llama-7b",
        {
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "recompute.kind": RecomputeKind.FULL,
            "recompute.reentrant": True,
            "precision": Precision.FP16_AMP,
            "optimizer": "adafactor",
            "clip_gradients": False,
            "compile": True,
            "kernels": Kernels.LIGER,
            "adapter": None,
        },
    ),
    "torchtune_lora.yaml": (
        "llama-2-7b",
        {
            "micro_batch_size": 2,
            "sequence_length": 4096,
            "gradient_accumulation_steps": 8,
            "adapter.rank": 8,
            "adapter.dtype": "bf16",
            "adapter.targets": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "precision": Precision.BF16,
            "optimizer": "adamw-fused",
            "loss": Loss.CHUNKED,
            "recompute.kind": RecomputeKind.FULL,
            "offload.activations": True,
            "offload.style": "torchtune",
            "stack": "torchtune",
            "clip_gradients": False,
            "batch.packing": True,
            "quantization": None,
        },
    ),
    "torchtune_qlora.yaml": (
        "llama-2-7b",
        {
            "quantization.format": "nf4",
            "quantization.kbit_preparation": False,
            "optimizer": "paged-adamw-8bit",
            "recompute.kind": RecomputeKind.NONE,
        },
    ),
    "torchtune_full.yaml": (
        "llama",
        {
            "adapter": None,
            "optimizer": "adamw-foreach",
            "optimizer_in_backward": True,
            "precision": Precision.FP32,
            "clip_gradients": False,
        },
    ),
    "llama_factory_lora.yaml": (
        "llama-2-7b",
        {
            "micro_batch_size": 2,
            "sequence_length": 1024,
            "gradient_accumulation_steps": 4,
            "adapter.rank": 16,
            "adapter.targets": ("all-linear",),
            "quantization.format": "nf4",
            "recompute.kind": RecomputeKind.FULL,
            "recompute.reentrant": True,
            "precision": Precision.BF16_AUTOCAST,
        },
    ),
    "llama_factory_full.json": (
        "llama-7b",
        {
            "adapter": None,
            "precision": Precision.BF16_AMP,
            "recompute.kind": RecomputeKind.NONE,
            "optimizer": "galore",
            "kernels": Kernels.LIGER,
            "attention": Attention.SDPA,
            "sequence_length": 2048,
        },
    ),
    "deepspeed_zero3.json": (
        "",
        {
            "micro_batch_size": 1,
            "parallel.data_parallel": DataParallel.ZERO3,
            "offload.optimizer": True,
            "offload.parameters": True,
            "parallel.nvme": ("optimizer",),
            "precision": Precision.BF16_AUTOCAST,
            "parallel.zero": ZeroConfig(
                overlap_comm=True,
                reduce_bucket_size=0,
                prefetch_bucket_size=0,
                param_persistence_threshold=0,
                max_live_parameters=500_000_000,
                hpz_partition_size=1,
            ),
        },
    ),
    "deepspeed_zero2.json": (
        "",
        {
            "parallel.data_parallel": DataParallel.ZERO2,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 8,
            "precision": Precision.FP16_AUTOCAST,
            "parallel.zero": ZeroConfig(
                overlap_comm=False,
                reduce_bucket_size=200_000_000,
                allgather_bucket_size=200_000_000,
            ),
        },
    ),
    "megatron_gpt3_175b.sh": (
        "megatron",
        {
            "parallel.tensor_parallel_size": 8,
            "parallel.pipeline_parallel_size": 16,
            "parallel.data_parallel_size": 1,
            "parallel.sequence_parallel": True,
            "gradient_accumulation_steps": 1536,
            "sequence_length": 2048,
            "precision": Precision.FP16,
            "recompute.kind": RecomputeKind.NONE,
            "stack": "megatron",
        },
    ),
    "megatron_moe.sh": (
        "megatron",
        {
            "parallel.tensor_parallel_size": 4,
            "parallel.pipeline_parallel_size": 2,
            "parallel.data_parallel_size": 2,
            "parallel.expert_parallel_size": 2,
            "parallel.virtual_pipeline_size": 2,
            "parallel.data_parallel": DataParallel.ZERO1,
            "gradient_accumulation_steps": 64,
            "recompute.kind": RecomputeKind.FULL,
            "precision": Precision.BF16,
        },
    ),
    "accelerate_fsdp2.yaml": (
        "",
        {
            "parallel.data_parallel": DataParallel.FSDP2,
            "parallel.data_parallel_size": 16,
            "parallel.reshard_after_forward": True,
            "parallel.broadcast_loading": True,
            "recompute.kind": RecomputeKind.FULL,
            "offload.parameters": False,
        },
    ),
    "accelerate_fsdp1.yaml": (
        "",
        {
            "parallel.data_parallel": DataParallel.FSDP1,
            "parallel.sharding": Sharding.HYBRID,
            "parallel.data_parallel_size": 8,
            "offload.parameters": True,
            "parallel.backward_prefetch": False,
            "parallel.full_state_dict": True,
        },
    ),
    "accelerate_zero.yaml": (
        "",
        {
            "parallel.data_parallel": DataParallel.ZERO3,
            "parallel.data_parallel_size": 4,
            "gradient_accumulation_steps": 2,
            "offload.optimizer": True,
            "parallel.nvme": (),
        },
    ),
}
# What each file must say aloud.
SAID: dict[str, tuple[str, ...]] = {
    "own.yaml": (),
    "axolotl_qlora.yaml": ("axolotl", "ZeRO 2 taken from its name"),
    "trl_defaults.yaml": (
        "taken as 8",
        "taken as 1024",
        "gradient_checkpointing not given",
        "bf16 not given",
    ),
    "trl_qlora.yaml": ("dropout not given",),
    "torchtune_qlora.yaml": ("max_seq_len not given",),
    "llama_factory_full.json": ("ctx not given",),
    "deepspeed_zero3.json": ("grad_accum is 'auto'",),
}


def test_every_job_is_expected() -> None:
    assert {path.name for path in JOBS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_job_file_becomes_its_configuration(name: str) -> None:
    notes: list[str] = []
    options = read_job(str(JOBS / name), notes)
    model, fields = EXPECTED[name]
    config = train_config(options)
    if model:  # how accelerate and DeepSpeed spread a job names no model
        assert model_spec(options, notes).name == model
    assert {path: field_of(config, path) for path in fields} == fields


@pytest.mark.parametrize("name", SAID)
def test_what_is_assumed_or_ignored_is_said(name: str) -> None:
    notes: list[str] = []
    read_job(str(JOBS / name), notes)
    assert all(any(part in note for note in notes) for part in SAID[name]), notes
    if not SAID[name]:
        assert not notes


@pytest.mark.parametrize(
    "name",
    ["axolotl_qlora.yaml", "trl_qlora.yaml", "torchtune_lora.yaml", "llama_factory_lora.yaml"],
)
def test_keys_without_influence_are_not_listed(name: str) -> None:
    notes: list[str] = []
    read_job(str(JOBS / name), notes)
    assert not [note for note in notes if "ignored" in note], notes


@pytest.mark.parametrize("name", EXPECTED)
def test_command_line_overrides_the_job(name: str) -> None:
    notes: list[str] = []
    options = with_job_file(
        {"job": str(JOBS / name), "bs": "3", "method": ["full"], "arch": "L2 h64 a4 f128 v100"},
        notes,
    )
    config = train_config(options)
    assert (config.micro_batch_size, config.adapter, config.quantization) == (3, None, None)
    assert model_spec(options, notes).num_layers == 2
    assert any("the command line replaces" in note for note in notes) == (
        name != "own.json" and EXPECTED[name][0] != ""
    ), (
        "own.json's arch is given again, nothing else gives way, and what names no model gives"
        " none up"
    )


def test_job_file_runs_end_to_end() -> None:
    done = run(str(JOBS / "own.json"), "--gpu", "4090")
    assert done.code == 0 and "RTX 4090" in done.out
    assert run(str(JOBS / "own.yaml"), "--ctx", "512", "--lengths", "512").code in (0, 1, 3)


def test_model_config_given_as_job(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers":'
        ' 2, "num_attention_heads": 4, "vocab_size": 99}'
    )
    done = run(str(file), "--ctx", "64")
    assert done.code == 0 and "tiny" in done.out


def test_yaml_needs_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    file = tmp_path / "job.yaml"
    file.write_text("model: llama-7b\n")
    with pytest.raises(InputError, match="pip install pyyaml"):
        read_job(str(file), [])
    json_file = tmp_path / "job.json"
    json_file.write_text('{"model": "llama-7b"}')
    assert read_job(str(json_file), []) == {"model": "llama-7b"}


def test_micro_steps_follow_from_deepspeeds_whole_batch(tmp_path: Path) -> None:
    job = tmp_path / "ds.json"
    job.write_text(
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization":'
        ' {"stage": 2}}',
        encoding="utf-8",
    )
    done = run(str(job), "--model", "llama-7b", "--full", "--gpus", "8", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["config"]["gradient_accumulation_steps"] == 4


def test_a_file_of_no_known_tool_is_refused_as_such(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("version: '3'\nservices: {trainer: {image: x}}\n", encoding="utf-8")
    with pytest.raises(InputError, match="is of no tool whose files are read: its keys are"):
        read_job(str(job), [])
    job.write_text("model: llama-7b\nbs: 2\ncheckpionting: full\n", encoding="utf-8")
    with pytest.raises(InputError, match="unknown key 'checkpionting'; did you mean checkpointing"):
        read_job(str(job), [])


@pytest.mark.parametrize(
    "said",
    [
        "infer_backend: vllm",
        "export_dir: out",
        "stage: sft\ndo_predict: true\nfinetuning_type: lora",
        "adapter_name_or_path: saves/lora\nfinetuning_type: lora",
    ],
)
def test_a_file_of_llama_factory_that_trains_nothing_is_refused(said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model_name_or_path: Qwen/Qwen2.5-0.5B\ntemplate: qwen\n{said}\n")
    with pytest.raises(InputError, match="trains nothing"):
        with_job_file({"job": str(path)}, [])


@pytest.mark.parametrize(
    ("said", "precision"),
    [
        ("finetuning_type: lora", "bf16"),  # loaded as stored, and no autocast
        ("finetuning_type: lora\nbf16: true", "bf16-autocast"),
        ("finetuning_type: full", "fp32"),  # what is trained is upcast
        ("finetuning_type: full\nuse_badam: true", "bf16"),
        ("finetuning_type: full\nuse_badam: true\nbf16: true", "bf16-autocast"),
    ],
)
def test_the_type_of_llama_factory_s_weights(said: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        f"model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\ndo_train: true\n{said}\n"
        "template: llama3\ncutoff_len: 64\n",
        encoding="utf-8",
    )
    assert with_job_file({"job": str(path)}, [])["precision"] == precision


def test_older_names_of_llama_factory_s_preference_losses(tmp_path: Path) -> None:
    """Release 0.7 src/llamafactory/hparams/finetuning_args.py RLHFArguments."""
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\ntemplate: qwen\nstage: dpo\ndo_train: true\n"
        "finetuning_type: lora\ncutoff_len: 64\nbf16: true\n"
        "dpo_loss: kto_pair\ndpo_beta: 0.2\norpo_beta: 0.1\ndpo_ftx: 1.0\n",
        encoding="utf-8",
    )
    assert with_job_file({"job": str(tmp_path / "a.yaml")}, [])["workload"] == "dpo"
    told = run(str(tmp_path / "a.yaml"), "--gpu", "h100").err
    assert "not priced: dpo_ftx" in told and "left out" not in told


@pytest.mark.parametrize(
    ("method", "bits", "quant"),
    [("hqq", 8, "hqq-int8"), ("hqq", 4, "hqq-int4"), ("eetq", 8, "eetq-int8"), ("bnb", 8, "int8")],
)
def test_llama_factory_s_methods_of_quantization(
    method: str, bits: int, quant: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\ndo_train: true\n"
        f"quantization_method: {method}\nquantization_bit: {bits}\n"
    )
    assert with_job_file({"job": str(path)}, [])["quant"] == quant


@pytest.mark.parametrize(
    ("said", "layerwise"),
    [
        ("use_galore: true\ngalore_layerwise: true\nstage: sft\ntemplate: llama3\n", True),
        ("use_galore: true\nstage: sft\ntemplate: llama3\n", False),
        ("optim: galore_adamw_layerwise\n", True),
    ],
)
def test_layerwise_optimizers_drop_gradients_in_the_backward(
    said: str, layerwise: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model_name_or_path: meta-llama/Llama-3.2-1B\n{said}max_grad_norm: 1.0\n")
    notes: list[str] = []
    found = with_job_file({"job": str(path)}, notes)
    assert any("beside LoRA is refused" in note for note in notes) is ("use_galore" in said)
    assert find_optimizer(str(found["optimizer"])).name == "galore"
    assert bool(found.get("optimizer_in_backward")) is layerwise
    assert found["clip"] is not layerwise


def test_a_further_adapter_on_a_published_one_is_priced_on_its_base(tmp_path: Path) -> None:
    """alignment-handbook's zephyr-7b-beta/dpo/config_qlora.yaml."""
    path = tmp_path / "a.yaml"
    text = "model_name_or_path: a/zephyr-7b-sft-qlora\nbeta: 0.01\nload_in_4bit: true\nlora_r: 8\n"
    path.write_text(f"{text}use_peft: true\n")
    found = with_job_file({"job": str(path)}, [])
    assert found["model"] == "a/zephyr-7b-sft"
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["model_name_or_path"]
    path.write_text(text.replace("zephyr-7b-sft", "nobody-has-this"))
    assert with_job_file({"job": str(path)}, [])["model"] == "a/nobody-has-this-qlora"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # AReaL training/configs/sft.yaml: its model.type is diffusion-pipe's mark by name alone
        (
            "experiment_name: sft\ntrial_name: a\nmodel: {type: {_class: qwen3}, path: p}\n"
            "dataset: {train_path: d}\n",
            "AReaL's",
        ),
        # EasyR1 examples/config.yaml: verl's algorithm, with a batch of 1 in place of its own
        (
            "algorithm: {adv_estimator: grpo}\nworker: {actor: {global_batch_size: 128,"
            " model: {model_path: Qwen/Qwen2.5-7B-Instruct}}}\ntrainer: {n_gpus_per_node: 8}\n",
            "EasyR1's",
        ),
        # ROLL: a Trainer's arguments in a section of each role
        (
            "exp_name: a\npretrain: Qwen/Qwen2.5-7B\nactor_train:\n  model_args: {dtype: bf16}\n"
            "  training_args: {per_device_train_batch_size: 2}\n",
            "ROLL's",
        ),
        ("defaults: [env/a@env.eval, _self_]\ncluster: {component_placement: {}}\n", "RLinf's"),
        ("agent: {name: a}\nstepwise_advantage: {mode: broadcast}\nrollout: {n: 8}\n", "rLLM's"),
        ("tinker_base_url: null\nmodel: {name: a}\ndata: {}\noptim: {lr: 1}\n", "Tinker's or"),
        ("defaults: [sft_trainer, _self_]\ndata: {a: 1}\n", "a part that Hydra puts together"),
    ],
)
def test_a_file_of_a_tool_that_is_not_read_is_not_anothers(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"is {said}.*which is not read; give what it says"):
        with_job_file({"job": str(path), "model": "gpt2"}, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peft_enabled: false\nlora_r:\ntarget_modules:\n", (None, None, None)),
        ("lora_r:\nlora_alpha:\n", (None, None, None)),
        ("peft_enabled: true\nlora_r: 8\ntarget_modules: all-linear\n", ("lora", 8, "all-linear")),
        ("use_lora: true\nlora_rank: 4\ntarget_modules: [q_proj]\n", ("lora", 4, ["q_proj"])),
    ],
)
def test_a_file_of_one_s_own_script_says_its_adapter(
    tmp_path: Path, text: str, said: tuple[object, ...]
) -> None:
    """An empty `lora_r` beside `peft_enabled: false` was LoRA of rank 16."""
    path = tmp_path / "train.yaml"
    path.write_text(f"model_name_or_path: llama-160m\nper_device_train_batch_size: 2\n{text}")
    found = with_job_file({"job": str(path)}, [])
    assert tuple(found.get(key) for key in ("method", "rank", "targets")) == said


def test_a_rank_without_a_switch_says_what_trl_would_do(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: llama-160m\ndataset_name: a/b\nlora_r: 8\n")
    assert with_job_file({"job": str(path)}, notes)["method"] == "lora"
    assert any("TRL's own trains all weights then: --method full" in note for note in notes)


def test_fsdp_config_may_name_a_file(tmp_path: Path) -> None:
    """simplescaling/s1's, which was refused as no mapping; one that is not here is named."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "f.json").write_text('{"activation_checkpointing": true}')
    line = (
        "torchrun --nproc_per_node 4 train/sft.py --model_name_or_path llama-160m --bf16 True"
        ' --per_device_train_batch_size 1 --fsdp "full_shard auto_wrap"'
    )
    script = tmp_path / "train" / "sft.sh"
    script.write_text(f"{line} --fsdp_config train/f.json\n")
    found = with_job_file({"job": str(script)}, [])
    assert (found["data_parallel"], found["checkpointing"]) == (["fsdp1"], "full")
    (tmp_path / "train" / "f.json").unlink()
    found = with_job_file({"job": str(script)}, [])
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys) and found["data_parallel"] == ["fsdp1"]
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["fsdp_config"]
    script.write_text(line + """ --fsdp_config '{"activation_checkpointing": true}'\n""")
    found = with_job_file({"job": str(script)}, [])
    assert (found["data_parallel"], found["checkpointing"]) == (["fsdp1"], "full")


def test_deepspeeds_file_may_be_json_on_the_line(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 4 sft.py --model_name_or_path llama-160m --bf16 True"
    settings = json.dumps({"zero_optimization": {"stage": 3}})
    (tmp_path / "sft.sh").write_text(f"{line} --deepspeed '{settings}'\n")
    assert with_job_file({"job": str(tmp_path / "sft.sh")}, [])["data_parallel"] == ["zero3"]


@pytest.mark.parametrize(
    ("key", "flag"),
    [("per_device_train_batch_size", "bs"), ("gradient_accumulation_steps", "grad_accum")],
)
def test_a_size_that_is_auto_is_named_and_not_read_as_a_number(
    tmp_path: Path, key: str, flag: str
) -> None:
    """ "--grad-accum 'auto' is not a whole number" named a flag that nobody gave."""
    path = tmp_path / "train.yaml"
    path.write_text(f"model_name_or_path: llama-160m\nmax_seq_length: 64\n{key}: auto\n")
    keys = with_job_file({"job": str(path)}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [(one.name, one.option) for one in keys.of(KeyUse.NOT_PRICED)] == [(key, flag)]
    given = with_job_file({"job": str(path), flag: 3}, [])
    assert isinstance(given["job_keys"], JobKeys) and given[flag] == 3
    assert not given["job_keys"].of(KeyUse.NOT_PRICED)
