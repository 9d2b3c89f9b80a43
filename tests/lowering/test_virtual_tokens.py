"""Prompt and prefix tuning, LoRA on embeddings and modules trained whole: by the rules and by PEFT
on meta tensors."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from agreement.tiny_configs import TINY
from lowering.both_ways import AttentionBackend, differences, traced, train_config
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config

VIRTUAL = 20
# What PEFT does around the model's forward (masks and labels of a few KiB) is not followed to the
# tensor.
CLOSE = 0.003


def by_rules(family: str, adapter: AdapterConfig, *, checkpointing: bool = False) -> Timeline:
    spec = read_config(TINY[family])
    recompute = RecomputeConfig(kind=RecomputeKind.FULL if checkpointing else RecomputeKind.NONE)
    config = train_config(adapter=adapter, stack="hf-bare", recompute=recompute)
    return simulate(build_step(spec, resolve(spec, config, None)), steps=2)


def by_peft(family: str, settings: Any, *, checkpointing: bool = False) -> Any:
    def wrap(model: Any) -> Any:
        with torch.device("meta"):
            return peft.get_peft_model(model, settings)

    return traced(
        dict(TINY[family]),
        change=wrap,
        checkpointing=checkpointing,
        attention_backend=AttentionBackend.AUTO,
    )


def largest(found: dict[Phase, float], *phases: Phase) -> float:
    return max(abs(found[phase]) for phase in phases)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("llama", False), ("llama", True), ("gpt2_no_dropout", False), ("gemma", True)],
)
def test_prompt_tuning(family: str, checkpointing: bool) -> None:
    ours = by_rules(
        family,
        AdapterConfig(kind=AdapterKind.PROMPT, num_virtual_tokens=VIRTUAL),
        checkpointing=checkpointing,
    )
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    assert (
        largest(
            differences(ours, by_peft(family, settings, checkpointing=checkpointing)),
            Phase.BACKWARD,
            Phase.STEP,
        )
        < CLOSE
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["t5", "flan_t5"])
def test_prompt_of_an_encoder(family: str) -> None:
    """16 tokens, so that the rows of the position bias stay multiples of eight, to which SDPA pads
    a mask."""
    ours = by_rules(family, AdapterConfig(kind=AdapterKind.PROMPT, num_virtual_tokens=16))
    settings = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=16)
    assert largest(differences(ours, by_peft(family, settings)), Phase.BACKWARD, Phase.STEP) < CLOSE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "llama_mha", "gpt2_no_dropout", "qwen3"])
def test_prefix_tuning(family: str) -> None:
    ours = by_rules(family, AdapterConfig(kind=AdapterKind.PREFIX, num_virtual_tokens=VIRTUAL))
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    assert (
        largest(
            differences(ours, by_peft(family, settings)), Phase.FORWARD, Phase.BACKWARD, Phase.STEP
        )
        < CLOSE
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_lora_on_the_embedding(family: str, checkpointing: bool) -> None:
    targets = ("embed_tokens", "q_proj", "v_proj")
    ours = by_rules(family, AdapterConfig(targets=targets), checkpointing=checkpointing)
    result = by_peft(
        family, peft.LoraConfig(r=16, target_modules=list(targets)), checkpointing=checkpointing
    )
    assert largest(differences(ours, result), Phase.FORWARD, Phase.BACKWARD, Phase.STEP) < CLOSE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_modules_trained_whole_are_copies_untied_from_each_other(family: str) -> None:
    ours = by_rules(family, AdapterConfig(trained_modules=("lm_head", "embed_tokens")))
    result = by_peft(
        family,
        peft.LoraConfig(
            r=16, target_modules="all-linear", modules_to_save=["lm_head", "embed_tokens"]
        ),
    )
    assert largest(differences(ours, result), Phase.FORWARD, Phase.BACKWARD, Phase.STEP) < CLOSE


def test_trained_parameters_are_those_of_the_papers() -> None:
    """A prompt is V x h; a prefix V x 2 x layers x keys' width."""
    for kind, width in ((AdapterKind.PROMPT, 2048), (AdapterKind.PREFIX, 2 * 16 * 8 * 64)):
        adapter = AdapterConfig(kind=kind, num_virtual_tokens=VIRTUAL)
        assert estimate("llama-3.2-1b", TrainConfig(adapter=adapter)).num_trained == VIRTUAL * width
    t5 = estimate(
        "t5-base",
        TrainConfig(adapter=AdapterConfig(kind=AdapterKind.PROMPT, num_virtual_tokens=VIRTUAL)),
    )
    assert (
        t5.num_trained == 2 * VIRTUAL * 768
    )  # peft gives encoder and decoder a row each; the decoder's are not read


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("t5-small", {}, "not for t5; use --lora"),
        (
            "llama-3.2-1b",
            {"recompute": RecomputeConfig(kind=RecomputeKind.FULL)},
            "add --checkpointing none",
        ),
    ],
)
def test_what_prefix_tuning_does_not_work_with(
    model: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        estimate(model, TrainConfig(adapter=AdapterConfig(kind=AdapterKind.PREFIX), **fields))
