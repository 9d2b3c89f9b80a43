"""Configs of people's own training scripts: sections whose keys are the Trainer's, and what is no
such file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.config.train_config import Precision
from napkinmath.inputs.job_file import read_job, with_job_file
from napkinmath.inputs.jobs import priced

SECTIONS = """
model: {id: Qwen/Qwen2.5-1.5B, attn_implementation: sdpa}
quantization: {enabled: true, load_in_4bit: true, bnb_4bit_quant_type: nf4}
lora: {r: 8, alpha: 16, dropout: 0.05, target_modules: [q_proj, v_proj]}
data: {max_seq_length: 1024, train_manifest: data/train.jsonl}
training:
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
  learning_rate: 2.0e-4
  optim: paged_adamw_32bit
  gradient_checkpointing: true
  bf16: true
"""
FLAT = """
model_name: Qwen/Qwen2.5-1.5B
max_length: 512
lora_r: 8
per_device_train_batch_size: 1
learning_rate: 1.0e-4
"""


def options_of(tmp_path: Path, text: str) -> tuple[dict[str, object], list[str]]:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    notes: list[str] = []
    return read_job(os.fspath(file), notes), notes


def test_sections_are_read_by_the_trainers_names(tmp_path: Path) -> None:
    """It was read as OpenRLHF's, whose keys `model` and `train` are others: a full fine-tuning of
    80 GiB for this run of 6."""
    options, notes = options_of(tmp_path, SECTIONS.replace("id:", "model_name_or_path:"))
    said = {"bs": 2, "ctx": 1024, "grad_accum": 4, "rank": 8, "quant": "nf4", "method": "lora"}
    assert {key: options[key] for key in said} == said
    assert options["targets"] == ["q_proj", "v_proj"]
    assert any("lora.r taken as lora_r" in note for note in notes)
    found = priced(with_job_file({"job": os.fspath(tmp_path / "train.yaml")}, []), [])[0]
    assert found.config.precision is Precision.BF16_AUTOCAST
    assert found.peak.nbytes < 8 << 30


def test_adapters_on_experts_are_read_from_a_section(tmp_path: Path) -> None:
    """The key was unknown, and the experts had none."""
    section = "lora: {target_parameters: [mlp.experts.gate_up_proj], "
    targets = options_of(tmp_path, SECTIONS.replace("lora: {", section))[0]["targets"]
    assert targets == ["q_proj", "v_proj", "mlp.experts.gate_up_proj"]


def test_a_models_usual_names_are_read(tmp_path: Path) -> None:
    assert options_of(tmp_path, SECTIONS)[0]["model"] == "Qwen/Qwen2.5-1.5B"
    flat = options_of(tmp_path, FLAT)[0]
    assert flat["model"] == "Qwen/Qwen2.5-1.5B" and flat["rank"] == 8


def test_a_section_is_read_beside_a_model_of_the_trainers_name(tmp_path: Path) -> None:
    """A config of a public repository had its batch, its precision and its adapter in sections and
    its model above them: 285 GiB of fp32 at the Trainer's own batch were said, LoRA takes 7.6."""
    text = (
        "extends: base.yaml\nmodel_name_or_path: Qwen/Qwen2.5-3B-Instruct\n"
        "sft: {per_device_train_batch_size: 2, max_seq_length: 2048, bf16: true}\n"
        "lora: {enabled: true, r: 16, lora_alpha: 32, task_type: CAUSAL_LM}\n"
    )
    options, notes = options_of(tmp_path, text)
    assert (options["bs"], options["ctx"], options["rank"]) == (2, 2048, 16)
    assert any("builds on 'base.yaml', which is not beside it" in note for note in notes)
    base = "sft: {gradient_checkpointing: true, per_device_train_batch_size: 4}\n"
    (tmp_path / "base.yaml").write_text(base)
    options, notes = options_of(tmp_path, text)
    assert options["checkpointing"] == "full" and options["bs"] == 2
    assert any("lies over 'base.yaml'" in note for note in notes)


@pytest.mark.parametrize(
    ("word", "workload"), [("dpo", "dpo"), ("moe_dpo", "dpo"), ("vlm_sft", None), ("lora", None)]
)
def test_the_method_is_what_the_file_says(tmp_path: Path, word: str, workload: str | None) -> None:
    """Liquid4All/leap-finetune job_configs: DPO was priced as SFT, images as text."""
    options, notes = options_of(tmp_path, f"training_type: {word}\n{FLAT}")
    assert options.get("workload") == workload
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    named = {key.name for key in keys.of(KeyUse.NOT_PRICED)}
    assert ("training_type" in named) is word.startswith("vlm")
    assert any("taken as --workload" in note for note in notes) is (word != "lora")


def test_sections_within_sections_are_read_and_those_of_inference_are_not(tmp_path: Path) -> None:
    """georgian-io/LLM-Finetuning-Toolkit examples/mistral_config.yml was refused."""
    text = (
        "model: {hf_model_ckpt: mistralai/Mistral-7B-v0.1, bitsandbytes: {load_in_4bit: true}}\n"
        "lora: {r: 32, target_modules: [q_proj, v_proj]}\n"
        "training: {training_args: {per_device_train_batch_size: 4, bf16: true,"
        " evaluation_strategy: steps}, sft_args: {max_seq_length: 500}}\n"
        "inference: {max_seq_length: 9000, per_device_train_batch_size: 1}\n"
    )
    options, _ = options_of(tmp_path, text)
    found = [options[key] for key in ("bs", "ctx", "rank", "quant")]
    assert found == [4, 500, 32, "nf4"]


def test_an_argument_of_older_transformers_says_how_weights_are_loaded(tmp_path: Path) -> None:
    for key in ("evaluation_strategy", "eval_strategy"):
        options, _ = options_of(tmp_path, f"{FLAT}bf16: true\n{key}: steps\n")
        keys = options["job_keys"]
        assert isinstance(keys, JobKeys)
        named = {one.name for one in keys.of(KeyUse.NOT_PRICED)}
        assert ("evaluation_strategy" in named) is (key == "evaluation_strategy")


def test_what_is_switched_off_is_left_out(tmp_path: Path) -> None:
    options, _ = options_of(tmp_path, SECTIONS.replace("enabled: true", "enabled: false"))
    assert "quant" not in options


@pytest.mark.parametrize(
    "text",
    [
        "experiment: {name: a}\ntraining: {batch_size: 2, epochs: 3}\n",  # whose batch it is is open
        "generation: {batch_size: 16}\nmodel: {name: gpt2}\n",
    ],
)
def test_what_says_no_trainers_name_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(InputError):
        job: dict[str, Any] = with_job_file({"job": os.fspath(file)}, [])
        priced(job, [])
