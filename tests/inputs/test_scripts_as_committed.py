"""Scripts that people committed in repositories of their own, each reading that was wrong in its
shortest form."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.base.errors import InputError
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

_LINE = "train.py --model_name_or_path llama-3.2-1b --bf16 --learning_rate 1e-5 --max_length 64\n"
# A job's or srun's GPUs, and those that the shell leaves visible, in front of launchers that start
# a process for each of them -> GPUs; None where nothing says how many.
STARTED = {
    "#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node $SLURM_GPUS_ON_NODE ": 4,
    "#SBATCH --gres=gpu:a100:4\ndeepspeed ": 4,
    "#SBATCH --gpus-per-node=2\naccelerate launch ": 2,
    "#SBATCH --nodes=2\n#SBATCH --gpus=8\ndeepspeed ": 4,
    "#SBATCH -G 3\naccelerate launch --mixed_precision bf16 ": 3,
    "srun --nodes=1 --gpus-per-node=3 deepspeed ": 3,
    "srun --gres=gpu:2 accelerate launch ": 2,
    "CUDA_VISIBLE_DEVICES=0,1 accelerate launch ": 2,
    "CUDA_VISIBLE_DEVICES=5 accelerate launch ": None,
    "#SBATCH --gres=gpu:4\naccelerate launch --num_processes 2 ": 2,
    "#SBATCH --gres=gpu:4\npython ": None,
}


def read(tmp_path: Path, text: str, name: str = "run.sh") -> tuple[dict[str, object], list[str]]:
    (tmp_path / name).write_text(text)
    notes: list[str] = []
    return with_job_file({"job": [str(tmp_path / name)]}, notes), notes


@pytest.mark.parametrize("front", STARTED)
def test_launchers_start_the_gpus_of_the_job(tmp_path: Path, front: str) -> None:
    found, notes = read(tmp_path, front + _LINE)
    gpus = found.get("gpus")
    assert (None if gpus in (None, 1) else gpus) == STARTED[front]
    assert not any("starts a process for each GPU" in note for note in notes)


def test_accelerate_without_a_number_starts_every_gpu(tmp_path: Path) -> None:
    assert any(
        note.startswith("accelerate starts a process for each GPU")
        for note in read(tmp_path, f"accelerate launch {_LINE}")[1]
    )


_PREPARED = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
model = AutoModelForCausalLM.from_pretrained("llama-3.2-1b"{loading})
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8{targets}))
Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=1, bf16=True)).train()
"""
_BITS = ", quantization_config=BitsAndBytesConfig(load_in_{}bit={})"


@pytest.mark.parametrize(
    ("loading", "precision", "checkpoints"),
    [
        ("", "bf16-amp", False),
        (", torch_dtype=torch.bfloat16", "bf16-amp", False),
        (_BITS.format(8, False), "bf16-amp", False),
        (_BITS.format(8, True), "bf16-autocast", True),
        (_BITS.format(4, True), "bf16-autocast", True),
    ],
)
def test_peft_prepares_a_whole_model_by_casts_alone(
    tmp_path: Path, loading: str, precision: str, checkpoints: bool
) -> None:
    found, _ = read(tmp_path, _PREPARED.format(loading=loading, targets=""), "train.py")
    config = priced({**found, "ctx": 64}, [])[0].config
    assert config.precision.value == precision
    assert (config.recompute is not None and config.recompute.kind.value == "full") is checkpoints


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("llama-3.2-1b", ("q_proj", "v_proj")),
        ("gpt2", ("c_attn",)),
        ("phi-2", ("q_proj", "v_proj", "fc1", "fc2")),
        ("bert-base-uncased", ("query", "value")),
        ("phi-3-mini-4k", ("all-linear",)),  # a type without a row: peft asks for names
    ],
)
def test_lora_without_targets_takes_pefts_own(
    tmp_path: Path, model: str, targets: tuple[str, ...]
) -> None:
    text = _PREPARED.format(loading="", targets="").replace("llama-3.2-1b", model)
    found, notes = read(tmp_path, text, "train.py")
    adapter = priced({**found, "ctx": 64}, [])[0].config.adapter
    assert adapter is not None and adapter.targets == targets
    assert any("targets not given" in note for note in notes)


_CHAT = """
import argparse, deepspeed
from utils.ds_utils import get_train_ds_config
def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_output_path", default="/tmp/data_files/")
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--max_seq_len", type=int, default=512)
    parser.add_argument("--zero_stage", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()
def main():
    args = parse_args()
    model, *_ = deepspeed.initialize(model=model, config=get_train_ds_config())
    model.backward(loss)
main()
"""


def test_a_line_runs_in_the_folder_above_that_has_its_script(tmp_path: Path) -> None:
    folder = tmp_path / "step1" / "training_scripts" / "single_gpu"
    folder.mkdir(parents=True)
    (tmp_path / "step1" / "main.py").write_text(_CHAT)
    line = "deepspeed --num_gpus 1 main.py --model_name_or_path facebook/opt-1.3b --zero_stage 2"
    (folder / "run.sh").write_text(f"{line} --gradient_accumulation_steps 2 --deepspeed\n")
    found = with_job_file({"job": [str(folder / "run.sh")]}, [])
    assert [found[key] for key in ("bs", "ctx", "grad_accum")] == [16, 512, 2]
    assert str(found["precision"]).startswith("fp16")


_SETTINGS = """
from dataclasses import dataclass
BASE_MODEL, BATCH = "llama-3.2-1b", 4
@dataclass
class Spec:
    hf_id: str
    max_length: int = 256
SPECS = {"small": Spec(hf_id=BASE_MODEL)}
def load(spec):
    return AutoModelForCausalLM.from_pretrained(spec.hf_id)
def never():
    SFTTrainer("gpt2", SFTConfig()).train()
"""
_IMPORTS = {
    "from settings import SPECS, BATCH, load\n": "SPECS['small']|BATCH|load",
    "import settings as cfg\n": "cfg.SPECS['small']|cfg.BATCH|cfg.load",
    "from .settings import *\n": "SPECS['small']|BATCH|load",
    "from src import settings\n": "settings.SPECS['small']|settings.BATCH|settings.load",
    "from src.settings import SPECS as all_of, BATCH as b, load as make\n": "all_of['small']|b|make",
}


@pytest.mark.parametrize("line", _IMPORTS)
def test_settings_of_a_module_beside_the_script_are_read(tmp_path: Path, line: str) -> None:
    spec, batch, load = _IMPORTS[line].split("|")
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "settings.py").write_text(_SETTINGS)
    text = (
        f"{line}spec = {spec}\n"
        "from trl import SFTConfig, SFTTrainer\n"
        f"args = SFTConfig(per_device_train_batch_size={batch}, max_length=spec.max_length)\n"
        f"SFTTrainer(model={load}(spec), args=args).train()\n"
    )
    found, notes = read(folder, text, "train.py")
    assert [found[key] for key in ("model", "bs", "ctx")] == ["llama-3.2-1b", 4, 256]
    assert any("settings.py" in note for note in notes)


_TEXTS = {
    "'q_proj, v_proj'.split(', ')": ["q_proj", "v_proj"],
    "[one.strip() for one in ' q_proj,v_proj'.split(',')]": ["q_proj", "v_proj"],
    "[one for one in NAMES if one != 'lm_head']": ["q_proj", "v_proj"],
    "[one for one in NAMES if one in model.names]": None,
}


@pytest.mark.parametrize("targets", _TEXTS)
def test_text_and_lists_are_worked_out(tmp_path: Path, targets: str) -> None:
    text = (
        "NAMES = ['q_proj', 'v_proj', 'lm_head']\n"
        "model = AutoModelForCausalLM.from_pretrained((Path('models') / 'gpt2').as_posix())\n"
        f"model = get_peft_model(model, LoraConfig(r=8, target_modules={targets}))\n"
        "Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=1)).train()\n"
    )
    if _TEXTS[targets] is None:
        with pytest.raises(InputError, match=r"target_modules comes from .*add --targets"):
            read(tmp_path, text, "train.py")
        return
    assert read(tmp_path, text, "train.py")[0]["targets"] == _TEXTS[targets]


_OTHERS = {
    "sourced settings": ("source env.sh\n{} --max_length $LENGTH\n", "LENGTH=128\n", 128),
    "of a worked-out folder": (
        'D="$(dirname "$0")"\n. "$D/env.sh"\n{} --max_length $LENGTH\n',
        "LENGTH=128\n",
        128,
    ),
    "a script that it runs": ("LENGTH=64 bash env.sh 32\n", "{} --max_length $1\n", 32),
    "by its name": ("./env.sh 32\n", "{} --max_length ${{1:-16}}\n", 32),
    "functions": ("source env.sh\nlaunch 256\n", "launch() {{\n{} --max_length $1\n}}\n", 256),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_files_that_a_script_sources_or_runs_are_followed(tmp_path: Path, name: str) -> None:
    text, other, length = _OTHERS[name]
    line = f"torchrun --nproc_per_node 2 {_LINE.replace(' --max_length 64', '').strip()}"
    (tmp_path / "env.sh").write_text(other.format(line))
    found, _ = read(tmp_path, text.format(line))
    assert (found["ctx"], found["gpus"]) == (length, 2)


def test_a_script_with_a_training_of_its_own_launches_that_one(tmp_path: Path) -> None:
    (tmp_path / "other.sh").write_text(f"python {_LINE.replace('llama-3.2-1b', 'gpt2')}")
    assert read(tmp_path, f"bash other.sh\npython {_LINE}")[0]["model"] == "llama-3.2-1b"


def test_a_script_that_runs_itself_ends(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="launches no training"):
        read(tmp_path, "source run.sh\nbash run.sh\n")


_PPO = """
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
config = PPOConfig(model_name="gpt2", mini_batch_size=4, ppo_epochs=4)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
trainer = {}
"""


@pytest.mark.parametrize(
    "call",
    [
        "PPOTrainer(config, model, ref_model=None, tokenizer=tokenizer, dataset=dataset)",
        "PPOTrainer(config=config, model=model, optimizer=optimizer)",
        "PPOTrainer(config, model, None, tokenizer)",
    ],
)
def test_a_policy_with_a_head_of_values_is_refused_by_its_release(
    tmp_path: Path, call: str
) -> None:
    with pytest.raises(InputError, match=r"PPOTrainer of TRL before 0\.12"):
        read(tmp_path, _PPO.format(call), "train.py")


def test_the_ppo_trainer_of_today_is_read(tmp_path: Path) -> None:
    call = "PPOTrainer(args=config, model=model, reward_model=model, value_model=model)"
    assert read(tmp_path, _PPO.format(call), "train.py")[0]["workload"] == "ppo"
