"""Releases of TRL: who names one, what its files say where they say nothing, and what its trainers
hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import Precision, RecomputeKind, TrainConfig
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.options import train_config

GRPO = (
    "model_name_or_path: Qwen/Qwen2.5-0.5B\nreward_funcs: accuracy\nnum_generations: 4\n"
    "per_device_train_batch_size: 4\nmax_completion_length: 128\nmax_prompt_length: 384\n"
)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("trl-0.9.6", "trl-0.11"),
        ("trl-0.15", "trl-0.15"),
        ("trl==0.16.1", "trl-0.18"),
        ("trl-0.20", "trl-0.21"),
        ("trl-1.4", "trl-1.9"),
        ("trl-1.16", "hf"),
        ("transformers-4.47", "hf-4.48"),
        ("transformers-4.51", "hf-4.57"),
        ("transformers==4.35.2", "hf-2023"),
    ],
)
def test_a_release_is_a_stack(said: str, name: str) -> None:
    assert find_stack(said).name == name


def test_releases_before_any_stack_are_refused() -> None:
    with pytest.raises(InputError, match=r"trl-0\.2"):
        find_stack("trl-0.2")


def config_of(folder: Path, text: str = GRPO, **given: object) -> tuple[TrainConfig, list[str]]:
    file = folder / "grpo.yaml"
    file.write_text(text)
    notes: list[str] = []
    options = with_job_file({"job": str(file), **given}, notes)
    return train_config({k: v for k, v in options.items() if k not in ("job", "model")}), notes


DEFAULTS = {  # precision, recomputation, reference
    "trl-0.16": (Precision.FP32, RecomputeKind.NONE, True),
    "trl-0.20": (Precision.BF16_AMP, RecomputeKind.NONE, False),
    "trl-0.24": (Precision.BF16_AMP, RecomputeKind.FULL, False),
    "hf": (Precision.BF16_AMP, RecomputeKind.FULL, False),
}


@pytest.mark.parametrize("release", DEFAULTS)
def test_a_file_has_the_defaults_of_the_release(release: str, tmp_path: Path) -> None:
    config, _ = config_of(tmp_path, stack=release)
    found = (config.precision, config.recompute.kind, config.workload.reference)
    assert found == DEFAULTS[release]


@pytest.mark.parametrize("place", ["requirements.txt", "Dockerfile"])
def test_what_is_pinned_beside_a_file_is_its_release(place: str, tmp_path: Path) -> None:
    text = GRPO.replace("max_prompt_length: 384\n", "")
    config, notes = config_of(tmp_path, text)
    assert config.stack == "hf"
    (tmp_path / place).write_text("RUN pip install trl[vllm]==0.16.1 other-trl==1.0\n")
    config, notes = config_of(tmp_path)
    assert config.stack == "trl-0.18" and any(place in note for note in notes)
    config, _ = config_of(tmp_path, stack="hf")
    assert config.stack == "hf"


@pytest.mark.parametrize(
    ("key", "stack"),
    [
        ("", "trl-0.29"),  # the text's max_prompt_length
        ("vllm_device: auto\n", "trl-0.18"),
        ("use_liger_loss: true\n", "trl-0.29"),
    ],
)
def test_a_key_that_later_releases_refuse_says_the_release(
    key: str, stack: str, tmp_path: Path
) -> None:
    config, notes = config_of(tmp_path, GRPO + key)
    assert config.stack == stack and any("of TRL up to" in note for note in notes)
    plain = key and config_of(tmp_path, "model_name_or_path: Qwen/Qwen2.5-0.5B\n" + key)[0]
    assert not plain or plain.stack == "hf"  # a Trainer's file
    assert config_of(tmp_path, GRPO + key, stack="trl-1.4")[0].stack == "trl-1.9"
    # unsloth puts its own loss, in chunks, into the trainer of any release
    assert config_of(tmp_path, f"{GRPO}{key}use_unsloth: true\n")[0].stack == "hf"


def test_a_model_by_name_is_loaded_in_fp32_unless_its_type_is_said(tmp_path: Path) -> None:
    """TRL's YAML files without a dtype were priced as if their weights had 16 bits."""
    for text, precision in (
        (GRPO, Precision.BF16_AMP),
        (f"{GRPO}dtype: bfloat16\n", Precision.BF16_AUTOCAST),
        (f"{GRPO}use_peft: true\n", Precision.BF16_AMP),
    ):
        config, _ = config_of(tmp_path, text)
        assert config.precision is precision


def test_trl_multiplies_packed_weights_in_the_type_of_loading(tmp_path: Path) -> None:
    """(get_quantization_config: bnb_4bit_compute_dtype=model_args.dtype, float32 by default.)"""
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: a\nload_in_4bit: true\n"
    found = []
    for more in ("", "dtype: bfloat16\n", "use_unsloth: true\n"):
        file = tmp_path / "sft.yaml"
        file.write_text(f"{text}use_peft: true\n{more}")
        found.append(with_job_file({"job": str(file)}, []).get("quant_compute_dtype"))
    assert found == ["fp32", None, None]


def test_a_script_that_loads_its_model_itself_has_the_checkpoints_type(tmp_path: Path) -> None:
    head = "from transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n"
    args = "args = SFTConfig(output_dir='o', per_device_train_batch_size=1)\n"
    own = "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B')\n"
    found = []
    for load, model in ((own, "m"), ("", "'Qwen/Qwen2.5-0.5B'")):
        file = tmp_path / "train.py"
        file.write_text(f"{head}{load}{args}SFTTrainer(model={model}, args=args).train()\n")
        found.append(with_job_file({"job": str(file)}, [])["precision"])
    assert found == ["bf16-checkpoint", "bf16-amp"]


_HEAD = (
    "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    "from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer\n"
    "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B'{})\n"
)


def script_options(folder: Path, text: str, load: str = "") -> dict[str, object]:
    file = folder / "train.py"
    file.write_text(_HEAD.replace("{}", load) + text)
    return dict(with_job_file({"job": str(file)}, []))


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("SFTTrainer(m, args=TrainingArguments('o', bf16=True), packing=True)", "trl-0.14"),
        ("SFTTrainer(m, args=TrainingArguments('o', bf16=True), max_seq_length=64)", "trl-0.14"),
        ("DPOTrainer(m, args=TrainingArguments('o', bf16=True), beta=0.1)", "trl-0.14"),
        ("SFTTrainer(m, args=SFTConfig('o', bf16=True), tokenizer=t)", "trl-0.15"),
        ("SFTTrainer(m, args=SFTConfig('o', bf16=True, max_seq_length=64))", "trl-0.21"),
        (
            "SFTTrainer(m, args=SFTConfig('o', bf16=True, evaluation_strategy='no'))",
            "trl-0.11",
        ),
        ("Trainer(m, TrainingArguments('o', bf16=True), tokenizer=t)", "hf-4.57"),
        ("Trainer(m, TrainingArguments('o', bf16=True, evaluation_strategy='no'))", "hf-4.45"),
        ("Trainer(m, TrainingArguments('o', bf16=True), processing_class=t)", None),
        ("SFTTrainer(m, args=SFTConfig('o', bf16=True, max_length=64))", None),
    ],
)
def test_what_a_script_gives_its_trainer_says_the_release(
    text: str, stack: str | None, tmp_path: Path
) -> None:
    """Scripts that only older releases take had the newest's loss, and the checkpoint's type where
    transformers before 5 makes fp32 weights (1.5B with SFTTrainer(max_seq_length=1024): 22 GiB
    for 47)."""
    text += ".train()\n"
    found = script_options(tmp_path, text)
    assert found.get("stack") == stack
    assert found["precision"] == ("bf16-amp" if stack else "bf16-checkpoint")
    told = script_options(tmp_path, text, ", torch_dtype='bfloat16'")
    assert told["precision"] == "bf16-autocast"
    assert script_options(tmp_path, f"import unsloth\n{text}").get("precision") is not None


@pytest.mark.parametrize(
    ("words", "packed"),
    [
        ("max_length=64, packing=True", True),
        ("max_length=64, packing=True, packing_strategy='wrapped'", None),
        ("max_length=64, packing=True, evaluation_strategy='no'", None),
    ],
)
def test_rows_that_older_releases_pack_have_no_ends(
    words: str, packed: bool | None, tmp_path: Path
) -> None:
    """They went through flash-attn, which a T4 has not."""
    args = f"SFTConfig('o', bf16=True, {words})"
    found = script_options(tmp_path, f"SFTTrainer(m, args={args}).train()\n")
    assert found.get("packing") is packed


def test_zero3_holds_a_reference_of_its_own_beside_adapters_until_0_18() -> None:
    """(0.5B parameters in bf16 over two ranks.)"""
    given = {"workload": "grpo", "rollout": "none", "method": "lora", "gpus": 2, "zero": 3}
    now, then = (
        estimate("qwen2.5-0.5b", train_config({**given, "stack": f"trl-0.{n}", "reference": True}))
        for n in (20, 16)
    )
    loads = [sum("reference" in s.name for s in e.step.load) for e in (now, then)]
    assert loads[0] == 0 < loads[1]


def test_a_pin_of_the_repository_s_root_counts(tmp_path: Path) -> None:
    job = tmp_path / "repo" / "recipes" / "grpo" / "x.yaml"
    job.parent.mkdir(parents=True)
    job.write_text("model_name_or_path: llama-3.2-1b\nnum_generations: 4\n")
    (tmp_path / "requirements.txt").write_text("trl==0.14\n")
    (tmp_path / "repo" / ".git").mkdir()
    assert not with_job_file({"job": str(job)}, []).get("reference")
    (tmp_path / "repo" / "setup.py").write_text('deps = ["trl[vllm]==0.18.0"]\n')
    found = with_job_file({"job": str(job)}, [])
    assert (found["stack"], found["reference"]) == ("trl-0.18", True)


def test_a_release_before_every_stack_is_the_first_one(tmp_path: Path) -> None:
    """Llama 2's notebooks pin trl 0.4.7 and were priced with the loss of today's."""
    body = "model_name_or_path: llama-160m\ndataset_name: a/b\nmax_seq_length: 512\n"
    stacks: list[object] = []
    for pin in ("0.4.7", "0.7.4", "99.1"):
        (tmp_path / "requirements.txt").write_text(f"trl=={pin}\n")
        (tmp_path / "sft.yaml").write_text(body)
        stacks.append(with_job_file({"job": str(tmp_path / "sft.yaml")}, []).get("stack"))
    assert stacks == ["trl-0.11", "trl-0.11", None]
