"""Readings of public files that a person found wrong, in their shortest form."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import read_job

_UNSLOTH = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("{model}", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules={targets})
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=1)).train()
"""
_EMBEDDINGS = """
from unsloth import FastSentenceTransformer
from sentence_transformers import SentenceTransformerTrainer, losses
from sentence_transformers import SentenceTransformerTrainingArguments
model = FastSentenceTransformer.from_pretrained("unsloth/bge-m3", max_seq_length=512)
model = FastSentenceTransformer.get_peft_model(model, r=32, target_modules=["key", "query"])
SentenceTransformerTrainer(
    model=model,
    loss=losses.MultipleNegativesRankingLoss(model),
    args=SentenceTransformerTrainingArguments(per_device_train_batch_size=16, bf16=True),
).train()
"""
_BY_NAME = """
import torch
from transformers import AutoModelForCausalLM
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser
args, told = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
kind = told.dtype if told.dtype in ["auto", None] else getattr(torch, told.dtype)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=kind)
SFTTrainer(model=model, args=args).train()
"""
_AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 8, local_batch_size: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed: {strategy: fsdp2, tp_size: 4, dp_replicate_size: none}
"""
_SLIME = """
ray job submit -- python3 train.py --hf-checkpoint /root/Qwen3-4B --tensor-model-parallel-size 2 \\
  --micro-batch-size 1 --actor-num-gpus-per-node 2 --rollout-batch-size 32 \\
  --n-samples-per-prompt 8 --num-steps-per-rollout 4 --rollout-max-response-len 1024 \\
  --advantage-estimator grpo --sglang-mem-fraction-static 0.7 --pipeline-model-parallel-size 1
"""
_IMAGES = """MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 256
  --decoder-seq-length: 1024
  --max-position-embeddings: 1024
  --vision-model-type: clip
  --bf16: true
  --fp8-format: hybrid
"""

# What the file is -> (its name, its text, options, keys that are named as not priced).
READ: dict[str, tuple[str, str, dict[str, object], tuple[str, ...]]] = {
    "experts that are stored in 4 bits": (
        "train.py",
        _UNSLOTH.format(model="unsloth/gpt-oss-20b", targets='["q_proj"]'),
        {"quantize_experts": True},
        (),
    ),
    "embeddings as a target": (
        "train.py",
        _UNSLOTH.format(model="unsloth/mistral-7b-v0.3", targets='["q_proj", "embed_tokens"]'),
        {"targets": ["q_proj"], "train_modules": ["embed_tokens"]},
        (),
    ),
    "embeddings trained by unsloth": (
        "train.py",
        _EMBEDDINGS,
        {"workload": "contrastive", "rank": 32, "ctx": 512, "checkpointing": "none"},
        ("max_seq_length",),
    ),
    "a type by its name": ("train.py", _BY_NAME, {"precision": "bf16-amp"}, ()),
    "ranks of Automodel's degrees": ("a.yaml", _AUTOMODEL, {"gpus": 4, "tp": 4}, ()),
    "steps of a rollout": (
        "run.sh",
        _SLIME,
        {"grad_accum": 64},
        ("sglang_mem_fraction_static",),
    ),
    "text beside images": (
        "model_config.yaml",
        _IMAGES,
        {"ctx": 1024, "precision": "fp8"},
        ("vision_model_type",),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_file_is_read_as_a_person_reads_it(name: str, tmp_path: Path) -> None:
    place, text, expected, unpriced = READ[name]
    file = tmp_path / place
    file.write_text(text)
    options = read_job(str(file), [])
    assert {key: options.get(key) for key in expected} == expected
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    assert set(unpriced) <= {key.name for key in keys.of(KeyUse.NOT_PRICED)}
    assert not keys.of(KeyUse.UNKNOWN)
