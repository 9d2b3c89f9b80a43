"""Patched models in transformers' Trainer and TRL's SFTTrainer: the losses of an unpatched run,
step by step."""

from __future__ import annotations

import pytest
import torch
import transformers
from napkinmath_kernels.patching import patch
from test_patch import make, quantize_to_4bit, with_adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
STEPS = 4


def examples():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 96, (12,), generator=generator).tolist() for _ in range(16)]
    return [{"input_ids": ids, "labels": [-100] * 3 + ids[3:]} for ids in tokens]


def model_of(four_bit, patched):
    torch.manual_seed(0)
    model = with_adapters(quantize_to_4bit(make("llama"))) if four_bit else make("llama")
    if patched:
        patch(model, attention="napkinmath")
    return model


def settings(**more):
    return {
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **more,
    }


def losses_of(trainer):
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True, "label_smoothing_factor": 0.1},
    ],
)
@pytest.mark.parametrize("four_bit", [False, True])
def test_transformers_trainer(tmp_path, four_bit, more):
    curves = []
    for patched in (False, True):
        options = transformers.TrainingArguments(str(tmp_path), **settings(**more))
        collate = transformers.default_data_collator
        model = model_of(four_bit, patched)
        curves.append(
            losses_of(
                transformers.Trainer(
                    model, options, train_dataset=examples(), data_collator=collate
                )
            )
        )
    assert curves[1] == pytest.approx(curves[0], abs=1e-3) and len(set(curves[0])) > 1


@pytest.mark.parametrize("padding_free", [False, True])
def test_sft_trainer(tmp_path, padding_free):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t0"
    )
    curves = []
    for patched in (False, True):
        options = trl.SFTConfig(
            str(tmp_path),
            **settings(gradient_checkpointing=False, bf16=False),
            max_length=None,
            padding_free=padding_free,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        dataset = datasets.Dataset.from_list(examples())
        model = model_of(False, patched)
        curves.append(
            losses_of(
                trl.SFTTrainer(
                    model, args=options, train_dataset=dataset, processing_class=tokenizer
                )
            )
        )
    assert curves[1] == pytest.approx(curves[0], abs=1e-3) and len(set(curves[0])) > 1
