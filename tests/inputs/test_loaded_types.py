"""Weights whose type nobody names: the Trainer keeps the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import AdapterConfig, Precision, TrainConfig
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

WIDE, NARROW = Precision.BF16_AMP, Precision.BF16_AUTOCAST
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"model": "bert-base-uncased"}, WIDE),
        ({"model": "gpt2", "method": "lora"}, WIDE),
        ({"model": "gpt2", "method": "qlora"}, WIDE),
        ({"model": "gpt2", "precision": "bf16-autocast"}, NARROW),
        ({"model": "gpt2", "precision": "bf16-checkpoint"}, WIDE),
        ({"model": "gpt2", "stack": "megatron"}, NARROW),
        ({"model": "gpt2", "precision": "checkpoint"}, Precision.FP32),
        ({"model": "qwen2.5-0.5b", "precision": "checkpoint"}, Precision.BF16),
        ({"model": "gpt2", "precision": "checkpoint-tf32"}, Precision.TF32),
        ({"model": "qwen2.5-0.5b", "precision": "checkpoint-tf32"}, Precision.BF16),
        ({"model": "qwen2.5-0.5b", "precision": "checkpoint", "stack": "hf-4.57"}, Precision.FP32),
        ({"config": {**LLAMA, "dtype": "float16"}, "precision": "checkpoint"}, Precision.FP16),
        ({"model": "qwen2.5-0.5b", "precision": "bf16-checkpoint"}, NARROW),
        ({"model": "whisper-small"}, WIDE),
        ({"model": "whisper-large-v3"}, NARROW),  # in fp16
        ({"config": {**LLAMA, "dtype": "float32"}}, WIDE),
        ({"config": {**LLAMA, "torch_dtype": "bfloat16"}}, NARROW),
        ({"config": LLAMA}, NARROW),
        ({"arch": "L2 h256 a4 v1000 gpt2"}, NARROW),
    ],
)
def test_weights_are_in_the_checkpoints_type(
    options: dict[str, object], precision: Precision
) -> None:
    found = priced(options, [])[0]
    assert found.config.precision is precision


def test_python_and_files_load_as_flags_do(tmp_path: Path) -> None:
    fields = estimate("gpt2", adapter=AdapterConfig(), sequence_length=64)
    words = estimate("gpt2", method="lora", ctx=64)
    assert fields.config == words.config and fields.config.precision is WIDE
    assert estimate("gpt2", TrainConfig()).config.precision is NARROW  # what was said
    file = tmp_path / "args.json"
    file.write_text(
        json.dumps({"model_name_or_path": "gpt2", "bf16": True, "per_device_train_batch_size": 1})
    )
    found = priced(with_job_file({"job": str(file)}, []), [])[0]
    assert found.config.precision is WIDE


def test_a_misspelt_spelling_is_suggested() -> None:
    with pytest.raises(InputError, match="did you mean bf16-checkpoint"):
        priced({"model": "gpt2", "precision": "bf16-checkpiont"}, [])
