"""The report's largest sizes: by requested bytes, exact to one more, and never below what the step
at hand shows."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    Batch,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.planning.largest import Largest, largest
from napkinmath.planning.search import largest_batch
from napkinmath.report.words import headline, largest_sizes, rate

FULL = RecomputeConfig(kind=RecomputeKind.FULL)
CASES: dict[str, tuple[str, TrainConfig, str]] = {
    "qlora": (
        "llama-3.2-1b",
        TrainConfig(adapter=AdapterConfig(), quantization=QuantizationConfig(), recompute=FULL),
        "RTX-4090",
    ),
    "full": ("llama-3.2-1b", TrainConfig(), "A100-80"),
    "window": ("gemma-3-1b", TrainConfig(adapter=AdapterConfig()), "RTX-4090"),
    "eager": ("gpt2", TrainConfig(attention=Attention.EAGER, sequence_length=512), "T4"),
    "prompt": (
        "llama-3.2-1b",
        TrainConfig(adapter=AdapterConfig(kind=AdapterKind.PROMPT), sequence_length=1000),
        "RTX-4090",
    ),
    "too large": ("llama-3.1-8b", TrainConfig(sequence_length=4096), "RTX-4090"),
}


def priced(case: str, **changes: Any) -> Estimate:
    model, config, gpu = CASES[case]
    return estimate(model, config.replace(**changes), hardware=gpu)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_more_is_too_many(case: str) -> None:
    e = priced(case)
    found = largest(e)
    assert found is not None
    limit = Largest(e)._limit
    for name, size in zip(("micro_batch_size", "sequence_length"), found, strict=True):
        assert size == 0 or priced(case, **{name: size}).memory.requested <= limit
        at_the_end = name == "sequence_length" and size == e.spec.longest_sequence
        assert at_the_end or priced(case, **{name: size + 1}).memory.requested > limit


def test_what_fits_is_within_the_largest() -> None:
    e = priced("qlora")
    found = largest(e)
    assert e.verdict is Verdict.FITS
    assert found is not None
    assert found[0] >= largest_batch(e).fits >= 1
    assert found[1] >= 2048


def test_the_estimate_is_left_as_it_was() -> None:
    e = priced("full")
    before = dict(e.step.symbols)
    largest(e)
    assert e.step.symbols == before


def test_nothing_is_said_without_a_gpu_or_with_several_lengths() -> None:
    assert largest(estimate("gpt2")) is None
    assert largest_sizes(estimate("gpt2")) == []
    assert (
        largest(estimate("gpt2", TrainConfig(batch=Batch(lengths=(10, 20))), hardware="T4")) is None
    )


def test_a_model_of_images_has_no_sequence_length() -> None:
    e = estimate("vit-base", TrainConfig(micro_batch_size=8), hardware="T4")
    assert headline(e)[1] == "batch 8 images"
    assert rate(e).endswith("images/s")
    assert len(largest_sizes(e)) == 1
    assert not any("context" in text for text in e.assumptions)


def test_padded_batches_are_said_to_be() -> None:
    e = estimate("gpt2", TrainConfig(batch=Batch(lengths=(100, 5000)), sequence_length=1024))
    assert headline(e)[1] == "batch 1, padded to the longest of each (100-1024 tokens)"
