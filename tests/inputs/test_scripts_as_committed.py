"""Scripts that people committed in repositories of their own, each reading that was wrong in its
shortest form."""

from __future__ import annotations

from pathlib import Path

import pytest
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
