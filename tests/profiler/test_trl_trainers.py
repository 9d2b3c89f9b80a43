"""TRL's own trainers on a CPU: what the pre-flight check reads of them, and their real steps beside
the priced workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import torch
import trl
from datasets import Dataset
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Timeline
from napkinmath.models.families import read_config
from napkinmath_profiler.preflight import Preflight
from napkinmath_profiler.preflight.trainer_callback import PreflightCallback
from napkinmath_profiler.trace import timeline_of, trace_module
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
)
SPEC = read_config({"model_type": "llama", **SIZES, "tie_word_embeddings": False})
PAIRS, PROMPT, ANSWER, GENERATED = 2, 64, 192, 32
# Masks, positions, log-probabilities and metrics, which no priced step has: kilobytes to a model's
# megabytes.
BESIDE = 0.03


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word of one letter."""
    words = {"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3, "[EOS]": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")


def settings(tmp_path: Path, rows: int, **more: Any) -> dict[str, Any]:
    return dict(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=rows,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=100,
        disable_tqdm=True,
        gradient_checkpointing=False,
        optim="adamw_torch",
        **more,
    )


def llama(kind: type = LlamaForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        LlamaConfig(**SIZES, attn_implementation="eager", use_cache=False, pad_token_id=1, **more)
    )


def adapters(method: str) -> LoraConfig | None:
    return (
        LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0) if method == "lora" else None
    )


def words(letter: str, count: int) -> str:
    return " ".join([letter] * count)


def preferences() -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [words("a", PROMPT)] * 8,
            "chosen": [words("b", ANSWER)] * 8,
            "rejected": [words("a", ANSWER)] * 8,
        }
    )


def trainer_of(kind: str, method: str, tmp_path: Path) -> Any:
    common: dict[str, Any] = {
        "processing_class": tokenizer(),
        "peft_config": adapters(method),
        "callbacks": [PreflightCallback(hardware="a100-80")],
    }
    if kind == "dpo":
        reference = None if method == "lora" else llama()
        arguments = trl.DPOConfig(**settings(tmp_path, PAIRS), max_length=PROMPT + ANSWER)
        return trl.DPOTrainer(
            model=llama(),
            ref_model=reference,
            args=arguments,
            train_dataset=preferences(),
            **common,
        )
    arguments = trl.GRPOConfig(
        **settings(tmp_path, 4),
        max_completion_length=GENERATED,
        num_generations=4,
        beta=0.1 if method == "lora" else 0.0,
        generation_kwargs={"min_new_tokens": GENERATED},
    )
    data = Dataset.from_dict({"prompt": [words("a", PROMPT)] * 8})
    return trl.GRPOTrainer(
        model=llama(), reward_funcs=lengths, args=arguments, train_dataset=data, **common
    )


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def observed(trainer: Any) -> tuple[Timeline, Preflight]:
    """Two real steps, every storage counted, and what the callback found before them."""
    timeline = timeline_of(
        trace_module(trainer.model, lambda: trainer.train(), num_steps=1), origin="observed on cpu"
    )
    callback = next(
        c for c in trainer.callback_handler.callbacks if isinstance(c, PreflightCallback)
    )
    assert callback.found is not None
    return timeline, callback.found


def held(e: Estimate | Timeline, phase: Phase, role: Role) -> int:
    timeline = e.timeline if isinstance(e, Estimate) else e
    return timeline.breakdown(timeline.phase_peaks()[phase]).get(role, 0)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_real_steps_hold_what_the_check_prices(kind: str, method: str, tmp_path: Path) -> None:
    """All but the head's tiles: a CPU runs another kernel there, whose copies are as large as its
    logits."""
    timeline, found = observed(trainer_of(kind, method, tmp_path))
    e = found.estimate
    assert e.config.workload.kind.value == kind and found.verdict is Verdict.FITS
    assert (found.shape.micro_batch_size, found.shape.sequence_length) == (
        4,
        PROMPT + (ANSWER if kind == "dpo" else GENERATED),
    )
    assert e.config.loss.value == "chunked" and e.config.workload.reference is (
        kind == "dpo" or method == "lora"
    )
    stays = held(
        timeline, Phase.STEP, Role.ACTIVATIONS
    )  # the reference's weights, which are not of the model that was observed
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert held(timeline, phase, Role.ACTIVATIONS) - stays == pytest.approx(
            held(e, phase, Role.ACTIVATIONS), rel=BESIDE
        )
    assert held(timeline, Phase.STEP, Role.OPTIMIZER) == pytest.approx(
        held(e, Phase.STEP, Role.OPTIMIZER), rel=BESIDE, abs=1 << 15
    )
    assert held(timeline, Phase.STEP, Role.GRADIENTS) == pytest.approx(
        held(e, Phase.STEP, Role.GRADIENTS), rel=BESIDE, abs=1 << 15
    )
    copies = 2 if kind == "dpo" and method == "full" else 1
    assert copies * held(timeline, Phase.STEP, Role.WEIGHTS) == pytest.approx(
        held(e, Phase.STEP, Role.WEIGHTS), rel=1e-6
    )


def test_a_rollouts_cache_is_for_all_micro_steps_at_once() -> None:
    """trl's steps_per_generation is the accumulation unless it is given, and generates as many
    sequences in one call."""
    arguments = trl.GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=3,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    options = {"workload": "grpo", "bs": 4, "ctx": 256, "precision": "fp32", "grad_accum": 3}
    e = estimate(SPEC, train_config(options))
    caches = [t for t in e.timeline.tensors if t.name == "key cache"]  # the prompt's, and grown
    cache = max(caches, key=lambda t: t.nbytes or 0)
    assert (
        cache.nbytes == arguments.generation_batch_size * 2 * 32 * 256 * 4 and cache.dtype == "fp32"
    )


def test_a_reward_model_is_read(tmp_path: Path) -> None:
    callback = PreflightCallback(hardware="a100-80")
    model = llama(LlamaForSequenceClassification, num_labels=1)
    trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**settings(tmp_path, PAIRS)),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        callbacks=[callback],
    ).train()
    found = callback.found
    assert (
        found is not None
        and found.shape.micro_batch_size == 2 * PAIRS
        and found.shape.sequence_length >= PROMPT + ANSWER
    )
    assert found.estimate.num_parameters == sum(p.numel() for p in model.parameters())
    assert not any("parameters" in finding.text for finding in found.findings)


def test_the_longest_row_of_supervised_training_is_found(tmp_path: Path) -> None:
    data = Dataset.from_dict({"input_ids": [[2] * n for n in (8, 24, 8, 8)]})
    callback = PreflightCallback(hardware="t4")
    trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**settings(tmp_path, 2), max_length=64),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=[callback],
    ).train()
    assert callback.found is not None and callback.found.shape.sequence_length == 24
    assert (
        callback.found.estimate.config.loss.value == "chunked"
        and callback.found.estimate.config.workload.is_plain
    )
