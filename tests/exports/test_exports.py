"""Exports: read back they are the same estimate; the classes of transformers, PEFT and accelerate
take them for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import Precision, TrainConfig
from napkinmath.config.zero_config import ZeroConfig
from napkinmath.estimate import estimate
from napkinmath.exports import KINDS, export, export_with_meaning
from napkinmath.exports.hf import lora_config, quantization_config, training_arguments
from napkinmath.exports.names import OPTIMIZERS
from napkinmath.inputs.job_file import read_job
from napkinmath.inputs.options import train_config

LORA: dict[str, object] = {
    "method": "lora",
    "rank": 8,
    "alpha": 32,
    "dropout": 0.05,
    "targets": "q_proj,v_proj",
}
CASES: dict[str, dict[str, object]] = {
    "full": {"bs": 2, "grad_accum": 4, "ctx": 1024, "optimizer": "adafactor"},
    "full in fp32 masters": {
        "precision": "bf16-amp",
        "checkpointing": "full",
        "optimizer": "adamw-8bit",
        "clip": False,
    },
    "full in fp32": {"precision": "fp32", "attention": "eager"},
    "full in pure bf16": {
        "precision": "bf16",
        "checkpointing": "full",
        "reentrant": True,
        "kernels": "liger",
    },
    "full in fp16": {"precision": "fp16-amp", "optimizer": "sgd", "attention": "sdpa"},
    "lora": {**LORA, "packing": True},
    "rank-stabilised dora": {
        **LORA,
        "method": "dora",
        "rslora": True,
        "checkpointing": "full",
        "train_modules": "lm_head",
    },
    "qlora": {
        "method": "qlora",
        "bs": 4,
        "optimizer": "paged-adamw-8bit",
        "ctx": "4k",
        "attention": "flash2",
    },
    "int8": {"method": "lora", "quant": "int8", "checkpointing": "full"},
}
TUNE_CASES: dict[str, dict[str, object]] = {
    "full": {
        "stack": "torchtune",
        "precision": "bf16",
        "bs": 2,
        "optimizer": "paged-adamw-8bit",
        "optimizer_in_backward": True,
        "clip": False,
    },
    "lora": {
        "stack": "torchtune",
        "precision": "bf16",
        "method": "lora",
        "rank": 16,
        "targets": "q_proj,v_proj,o_proj",
        "adapter_dtype": "bf16",
        "checkpointing": "full",
        "loss": "chunked",
        "clip": False,
    },
    "qlora": {
        "stack": "torchtune",
        "precision": "bf16",
        "method": "qlora",
        "rank": 8,
        "targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        "adapter_dtype": "bf16",
        "kbit": False,
        "grad_accum": 2,
    },
}


def read_again(text: str, folder: Path) -> tuple[dict[str, object], TrainConfig]:
    """The options and the configuration of an exported file, read as a user's job file."""
    file = folder / "exported.yaml"
    file.write_text(text)
    options = read_job(str(file), [])
    return options, train_config({key: value for key, value in options.items() if key != "model"})


# axolotl's switches settle the type of the weights, and after a k-bit preparation it makes half
# precision of everything again
AXOLOTL_CANNOT: dict[str, dict[str, object]] = {
    "full in fp32 masters": {"precision": "bf16-autocast"},
    "full in pure bf16": {"precision": "bf16-autocast"},
    "full in fp16": {"precision": "fp16-autocast"},
    "qlora": {"kbit": False},
    "int8": {"kbit": False},
}


@pytest.mark.parametrize("kind", ["hf", "axolotl"])
@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_the_same_estimate(kind: str, name: str, tmp_path: Path) -> None:
    changed = AXOLOTL_CANNOT.get(name, {}) if kind == "axolotl" else {}
    asked = train_config(CASES[name])
    text, notes = export(asked, "llama-3.2-1b", kind)
    assert len(notes) == len(changed) and all("axolotl cannot say" in note for note in notes)
    config = train_config({**CASES[name], **changed})
    options, again = read_again(text, tmp_path)
    assert options["model"] == "meta-llama/Llama-3.2-1B"
    before, after = (estimate("llama-3.2-1b", c, hardware="a100-80") for c in (config, again))
    assert before.memory == after.memory and before.breakdown == after.breakdown
    assert before.time == after.time


@pytest.mark.parametrize("name", TUNE_CASES)
def test_torchtune_round_trip(name: str, tmp_path: Path) -> None:
    config = train_config(TUNE_CASES[name])
    text, notes = export(config, "llama-3.1-8b", "torchtune")
    options, again = read_again(text, tmp_path)
    assert notes == [] and options["model"] in ("llama-3.1-8b", "llama3_1_8b")
    before, after = (estimate("llama-3.1-8b", c, hardware="a100-80") for c in (config, again))
    assert before.memory == after.memory and before.time == after.time


def test_what_a_file_cannot_say_is_said() -> None:
    config = train_config(
        {
            "method": "lora",
            "checkpointing": "selective",
            "precision": "bf16",
            "offload": "optimizer",
        }
    )
    _, notes, meant = export_with_meaning(config, "llama-7b", "axolotl")
    assert meant is not None and len(notes) == 3
    for word in ("recompute.kind=selective", "precision=bf16", "offload.optimizer=True"):
        assert any(word in note for note in notes)
    done = run(
        "--model",
        "llama-7b",
        "--lora",
        "--checkpointing",
        "selective",
        "--gpu",
        "a100-80",
        "--export",
        "hf",
    )
    assert done.code == 0 and "selective" in done.err and "as written it takes" in done.err
    assert yaml.safe_load(done.out)["gradient_checkpointing"] is True


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"method": "ia3"}, "hf"),
        ({"method": "lora", "quant": "gptq-int4"}, "axolotl"),
        ({"precision": "fp8"}, "hf"),
        ({"optimizer": "muon"}, "hf"),
        ({}, "torchtune"),
        ({"precision": "bf16-amp"}, "torchtune"),
        ({}, "nonsense"),
        ({"gpus": "4", "tp": 2}, "accelerate"),
        ({"gpus": "4", "data_parallel": "fsdp2"}, "deepspeed"),
    ],
)
def test_what_a_tool_cannot_run_is_refused(options: dict[str, object], kind: str) -> None:
    with pytest.raises(InputError):
        export(train_config(options), "gpt2", kind)


@pytest.mark.torch
@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing:FutureWarning"
)  # transformers 5.23 renames it; both names are read back
@pytest.mark.parametrize("name", CASES)
def test_transformers_and_peft_take_the_arguments(name: str, tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = train_config(CASES[name])
    wanted = training_arguments(config)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, **wanted
    )
    for key, value in wanted.items():
        assert getattr(arguments, key) == value, key
    lora = lora_config(config)
    if lora is not None:
        made = peft.LoraConfig(**lora)
        assert (
            made.r == config.adapter.rank
            and made.use_dora == lora["use_dora"]
            and made.lora_dropout == config.adapter.dropout
        )
    quantized = quantization_config(config)
    if quantized is not None:
        made = transformers.BitsAndBytesConfig(**quantized)
        assert made.load_in_4bit == ("load_in_4bit" in quantized) and made.load_in_8bit == (
            "load_in_8bit" in quantized
        )


@pytest.mark.torch
def test_optimizer_names_are_the_trainers() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    known = {member.value for member in training_args.OptimizerNames}
    assert set(OPTIMIZERS.values()) <= known
    for ours, theirs in OPTIMIZERS.items():
        assert train_config({"optimizer": theirs}).optimizer == ours


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-amp"},
        {"gpus": "8", "data_parallel": "fsdp2"},
        {"gpus": "4", "data_parallel": "fsdp1", "sharding": "grad-op"},
        {"gpus": "8", "zero": 3, "offload": "optimizer,parameters"},
        {"gpus": "2"},
    ],
)
def test_accelerate_loads_its_file(options: dict[str, object], tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = train_config(options)
    text, _ = export(config, "llama-7b", "accelerate")
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    loaded = config_args.load_config_from_file(str(file))
    assert loaded.num_processes == config.parallel.world_size and loaded.mixed_precision in (
        "no",
        "bf16",
    )
    kinds = {
        "fsdp2": "FSDP",
        "fsdp1": "FSDP",
        "zero3": "DEEPSPEED",
        "ddp": "MULTI_GPU",
        "none": "NO",
    }
    assert loaded.distributed_type.value == kinds[config.parallel.data_parallel.value]
    if "fsdp_config" in yaml.safe_load(text):
        fields = {
            f"fsdp_{name}"
            for name in pytest.importorskip(
                "accelerate"
            ).FullyShardedDataParallelPlugin.__dataclass_fields__
        }
        unknown = (
            set(loaded.fsdp_config)
            - fields
            - {"fsdp_version", "fsdp_offload_params", "fsdp_transformer_layer_cls_to_wrap"}
        )
        assert not unknown, unknown


SPREAD = (
    {"gpus": "8", "data_parallel": "fsdp2", "precision": "bf16-autocast"},
    {"gpus": "4", "data_parallel": "fsdp1", "sharding": "grad-op", "precision": "bf16-autocast"},
    {"gpus": "8", "zero": 3, "offload": "optimizer,parameters", "precision": "bf16-autocast"},
    {"gpus": "2", "precision": "bf16-autocast"},
)


@pytest.mark.parametrize("options", SPREAD)
def test_an_accelerate_file_is_read_back_as_the_same_rank(
    options: dict[str, object], tmp_path: Path
) -> None:
    config, notes = train_config(options), list[str]()
    (tmp_path / "accelerate.yaml").write_text(export(config, "llama-7b", "accelerate")[0])
    again = train_config(read_job(str(tmp_path / "accelerate.yaml"), notes))
    before, after = (estimate("llama-3.2-1b", c, hardware="a100-80") for c in (config, again))
    assert (
        before.memory == after.memory
        and before.config.parallel.world_size == after.config.parallel.world_size
    )
    assert not any("not priced" in note for note in notes), (
        "what was read is not said to be left out"
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [
        {"gpus": "8", "zero": 3, "bs": 2, "grad_accum": 4, "offload": "optimizer,parameters"},
        {"gpus": "4", "zero": 2},
        {"gpus": "2", "zero": 1, "precision": "fp16-amp"},
    ],
)
def test_a_deepspeed_file_is_read_by_accelerate_and_by_us(
    options: dict[str, object], tmp_path: Path
) -> None:
    reader = pytest.importorskip("accelerate.utils.deepspeed").HfDeepSpeedConfig
    config = train_config(options)
    text, _ = export(config, "llama-7b", "deepspeed")
    theirs = reader(json.loads(text))
    assert (theirs.is_zero3(), theirs.is_zero2(), theirs.is_offload()) == (
        options["zero"] == 3,
        options["zero"] == 2,
        "offload" in options,
    )
    assert theirs.get_value("train_micro_batch_size_per_gpu") == options.get("bs", 1)
    (tmp_path / "zero.json").write_text(text)
    again = train_config({**read_job(str(tmp_path / "zero.json"), []), "gpus": options["gpus"]})
    before, after = (
        estimate("llama-3.2-1b", c.replace(precision=Precision.BF16_AUTOCAST), hardware="a100-80")
        for c in (config, again)
    )
    assert before.memory == after.memory and before.host_bytes == after.host_bytes
    assert (
        again.parallel.data_parallel is config.parallel.data_parallel
        and again.offload == config.offload
    )
    assert (again.micro_batch_size, again.gradient_accumulation_steps) == (
        config.micro_batch_size,
        config.gradient_accumulation_steps,
    )


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CASES, "chunked"])
def test_trls_own_command_takes_the_file(name: str, tmp_path: Path) -> None:
    """Every key is one of TRL's: `trl sft --config FILE` refuses others."""
    trl = pytest.importorskip("trl")
    config = train_config({**CASES.get(name, {"loss": "chunked"})})
    file = tmp_path / "sft.yaml"
    file.write_text(
        export(config, "llama-3.2-1b", "hf")[0] + f"output_dir: {tmp_path}\nuse_cpu: true\n"
    )
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    _, arguments, model = parser.parse_args_and_config(
        ["--config", str(file)], fail_with_unknown_args=True
    )
    assert (
        arguments.per_device_train_batch_size == config.micro_batch_size
        and arguments.max_length == config.sequence_length
    )
    assert model.use_peft == (config.adapter is not None) and model.load_in_4bit == (
        config.quantization is not None and config.quantization.format == "nf4"
    )
    assert config.adapter is None or (model.lora_r, model.use_dora) == (
        config.adapter.rank,
        config.adapter.kind.value == "dora",
    )
    assert arguments.loss_type in (
        "nll",
        "chunked_nll",
    )  # the second is the first's old name since every model has a fused head


def test_deepspeed_file_adds_up() -> None:
    config = train_config(
        {"gpus": "8", "zero": 3, "bs": 2, "grad_accum": 4, "offload": "optimizer,parameters"}
    )
    content = json.loads(export(config, "llama-7b", "deepspeed")[0])
    assert (
        content["train_batch_size"] == 2 * 4 * 8
        and content["bf16"]["enabled"]
        and not content["fp16"]["enabled"]
    )
    zero = content["zero_optimization"]
    assert (
        zero["stage"] == 3
        and zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    )
    assert json.loads(export(train_config({}), "llama-7b", "deepspeed")[0])[
        "zero_optimization"
    ] == {"stage": 0}


def test_masters_of_a_deepspeed_file_are_written_again() -> None:
    zero = ZeroConfig(master_dtype="bf16", narrow_states=True, offload_ratio=0.5)
    options = {"gpus": "8", "zero": 3, "offload": "optimizer", "zero_options": zero}
    content = json.loads(export(train_config(options), "llama-7b", "deepspeed")[0])
    assert content["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
    assert content["zero_optimization"]["offload_optimizer"]["ratio"] == 0.5


@pytest.mark.slow
def test_plan_is_exported(tmp_path: Path) -> None:
    out = tmp_path / "best.yaml"
    argv = (
        "plan",
        "--model",
        "llama-3.2-1b",
        "--lora",
        "--checkpointing",
        "full",
        "--gpu",
        "rtx3060-12",
        "--export",
        "axolotl",
        "--out",
        str(out),
    )
    done = run(*argv)
    assert done.code == 0 and run(str(out), "--gpu", "rtx3060-12").code == 0
    assert run(*argv).code == 2
    assert set(KINDS) == {"hf", "axolotl", "torchtune", "accelerate", "deepspeed"}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b-instruct", "llama-3.1-8b-instruct"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("./mine", "./mine"),
        ("gpt3-175b", "gpt3-175b"),
    ],
)
def test_a_file_names_the_model_as_the_hub_does(given: str, written: str) -> None:
    text, _ = export(TrainConfig(), given, "axolotl")
    assert yaml.safe_load(text)["base_model"] == written


FURTHER: dict[str, dict[str, object]] = {
    "tiles of the MLP": {"method": "qlora", "mlp_tiles": 4},
    "preferences": {"method": "lora", "workload": "dpo"},
    "rollouts": {"method": "lora", "workload": "grpo", "rollout": "vllm", "completion": 256},
    "lengths": {"method": "lora", "lengths": "256,512,1024"},
    "several GPUs": {"method": "full", "gpus": 8, "data_parallel": "fsdp2"},
}


@pytest.mark.parametrize("kind", ["hf", "axolotl", "torchtune"])
@pytest.mark.parametrize("name", FURTHER)
def test_a_file_means_what_its_notes_leave_of_newer_options(
    kind: str, name: str, tmp_path: Path
) -> None:
    """What "take it along" of the page copies: the file is read as the job that it is said to
    mean, and a job that is another one has a note."""
    asked = train_config({"bs": 2, "ctx": 1024, **FURTHER[name]})
    text, notes, meant = export_with_meaning(asked, "llama-3.2-1b", kind)
    assert meant is not None
    _, again = read_again(text, tmp_path)
    asked_for, said, read = (
        estimate("llama-3.2-1b", c, hardware="a100-80") for c in (asked, meant, again)
    )
    assert said.memory == read.memory and said.time == read.time
    assert notes or (said.memory == asked_for.memory and said.time == asked_for.time)
