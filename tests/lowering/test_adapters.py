"""Adapters by the rules against traced steps of real PEFT, and their sizes against real PEFT
modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowering.both_ways import CLOSE, LLAMA, by_rules, differences, traced, train_config
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
)
from napkinmath.ir.ledger import Phase
from napkinmath.lowering.ia3 import TARGETS, default_targets
from napkinmath_profiler.tracing.meta_model import (
    AdapterOptions,
    QuantizationOptions,
    TrainMethod,
    prepare_for_kbit,
)
from napkinmath_profiler.tracing.quantized_model import quantize_4bit

FULL = RecomputeConfig(kind=RecomputeKind.FULL)
# The model's own function holds the embeddings to the end of the forward and the rules do not: 128
# KiB of these 23 to 80 MB.
FORWARD_CLOSE = 0.015


def wrapped(config: Any, *, quantized: bool = False) -> Callable[[Any], Any]:
    """What makes a PeftModel of a model on the meta device."""

    def change(model: Any) -> Any:
        from peft import get_peft_model

        if quantized:
            model = quantize_4bit(model, compute_dtype="bf16", options=QuantizationOptions())
            model = prepare_for_kbit(model, checkpointing=False, use_reentrant=False)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # PEFT asks transformers for a property by its old name
            return get_peft_model(model, config)

    return change


def check(found: dict[Phase, float]) -> None:
    """The phases in which a training step peaks are close; the forward but for the embeddings."""
    assert abs(found[Phase.BACKWARD]) < CLOSE / 10
    assert abs(found[Phase.STEP]) < CLOSE
    assert -FORWARD_CLOSE < found[Phase.FORWARD] < CLOSE / 10


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dora_is_the_traced_step(quantized: bool, dropout: float, checkpointing: bool) -> None:
    result = traced(
        method=TrainMethod.QLORA if quantized else TrainMethod.LORA,
        adapters=AdapterOptions(rank=8, use_dora=True, dropout=dropout),
        dtype="bf16",
        checkpointing=checkpointing,
    )
    config = train_config(
        adapter=AdapterConfig(kind=AdapterKind.DORA, rank=8, dropout=dropout),
        quantization=QuantizationConfig() if quantized else None,
        recompute=FULL if checkpointing else RecomputeConfig(),
    )
    check(differences(by_rules(config), result))


@pytest.mark.parametrize("quantized", [False, True])
def test_ia3_is_the_traced_step(quantized: bool) -> None:
    from peft import IA3Config

    result = traced(
        method=TrainMethod.FULL, change=wrapped(IA3Config(), quantized=quantized), dtype="bf16"
    )
    config = train_config(
        adapter=AdapterConfig(kind=AdapterKind.IA3, targets=default_targets("llama")),
        quantization=QuantizationConfig() if quantized else None,
    )
    check(differences(by_rules(config), result))


def test_ia3_scales_the_modules_that_peft_would() -> None:
    from napkinmath.lowering.ia3 import FEEDFORWARD
    from peft.utils.constants import (
        TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD_BY_TYPE,
    )
    from peft.utils.constants import (
        TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as TARGETS_BY_TYPE,
    )

    assert {family: tuple(TARGETS_BY_TYPE[family]) for family in TARGETS} == TARGETS
    for family, names in TARGETS.items():
        inside = [
            name
            for name in names
            if any(
                name == known or known.endswith("." + name) or name.endswith("." + known)
                for known in FEEDFORWARD
            )
        ]
        assert inside == list(FEEDFORWARD_BY_TYPE[family]), family


def test_rank_stabilized_scaling_takes_no_bytes() -> None:
    plain, stabilized = (
        by_rules(train_config(adapter=AdapterConfig(rank_stabilized=on))) for on in (False, True)
    )
    assert plain.phase_peaks() == stabilized.phase_peaks()
    result = traced(
        method=TrainMethod.LORA, adapters=AdapterOptions(rank=16, use_rslora=True), dtype="bf16"
    )
    check(differences(stabilized, result))


def test_further_adapters_take_their_weights_only() -> None:
    one, three = (
        by_rules(train_config(adapter=AdapterConfig(rank=8, num_adapters=n))) for n in (1, 3)
    )
    width, ffn, keys, layers = (
        LLAMA["hidden_size"],
        LLAMA["intermediate_size"],
        128,
        LLAMA["num_hidden_layers"],
    )
    inputs_and_outputs = [
        (width, width),
        (width, keys),
        (width, keys),
        (width, width),
        (width, ffn),
        (width, ffn),
        (ffn, width),
    ]
    adapter_bytes = layers * sum(8 * (i + o) * 4 for i, o in inputs_and_outputs)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
        assert (
            three.phase_peaks()[phase].nbytes - one.phase_peaks()[phase].nbytes == 2 * adapter_bytes
        )


def test_ia3_trains_as_many_parameters_as_peft() -> None:
    """Keys and values of 128 and the feed-forward's input of 704, in each of 5 layers; named by
    nobody."""
    from napkinmath.estimate import estimate
    from peft import IA3Config, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
        model = get_peft_model(
            AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)), IA3Config()
        )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 5 * (128 + 128 + 704)
    assert (
        estimate(LLAMA, sequence_length=64, adapter=AdapterConfig(kind=AdapterKind.IA3)).num_trained
        == trained
    )
