"""Megatron-LM's own loss writes over the fp32 logits; before core 0.8 it did so over a copy."""

from __future__ import annotations

from napkinmath.estimate import estimate

LENGTH, VOCABULARY = 2048, 128256


def peak(stack: str) -> int:
    model = f"L2 h256 a4 kv2 f704 v{VOCABULARY}"
    return estimate(arch=model, method="full", stack=stack, bs=1, seq=LENGTH).peak.nbytes


def test_the_older_loss_holds_one_more_copy_of_the_fp32_logits() -> None:
    assert peak("megatron-2024") - peak("megatron") == 4 * LENGTH * VOCABULARY
