"""A model left in eval mode, as loading leaves it: its own dropout is off, that of adapters, made
in training mode, is not."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.estimate import estimate
from napkinmath.inputs.options import train_config
from napkinmath.memory.replay import replay
from napkinmath_profiler.trace import prepared_model, trace_options
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from profiler.traced_families import FAMILIES

AGREED = 0.002
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {"llama": FAMILIES["llama"], "gpt2": GPT2}
LORA: dict[str, Any] = {"bs": 2, "ctx": 64, "method": "lora", "precision": "bf16", "eval": True}


def traced_and_priced(family: str, flags: dict[str, Any]) -> tuple[int, int]:
    config = train_config(flags)
    found = trace_options(
        config_from(CONFIGS[family]), options_from(config, compute_capability=(9, 0))
    )
    return (
        replay(timeline_of(found)).peak_allocated,
        estimate(CONFIGS[family], config).replay.peak_allocated,
    )


def test_peft_makes_its_modules_in_training_mode() -> None:
    model = prepared_model(config_from(GPT2), options_from(train_config({**LORA, "dropout": 0.05})))
    training = {name: module.training for name, module in model.named_modules()}
    assert all(is_on for name, is_on in training.items() if ".lora_dropout." in name)
    assert not any(
        is_on
        for name, is_on in training.items()
        if name.endswith((".mlp", ".attn", ".ln_1", ".resid_dropout", ".base_layer"))
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_trace_and_estimate_agree(family: str, dropout: float) -> None:
    traced, priced = traced_and_priced(family, {**LORA, "dropout": dropout})
    assert priced == pytest.approx(traced, rel=AGREED)


def test_dropout_of_adapters_costs_as_much_as_in_training() -> None:
    without, left, training = (
        traced_and_priced("llama", {**LORA, **flags})
        for flags in ({}, {"dropout": 0.05}, {"dropout": 0.05, "eval": False})
    )
    assert left == training and min(left) > max(without)
