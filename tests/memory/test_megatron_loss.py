"""Megatron-LM's own loss writes over the fp32 logits; before core 0.8 it did so over a copy. NeMo-RL's
log-probabilities are torch's operations one by one."""

from __future__ import annotations

import pytest
from napkinmath.estimate import estimate

LENGTH, VOCABULARY = 2048, 128256


def peak(stack: str, length: int = LENGTH) -> int:
    model = f"L2 h256 a4 kv2 f704 v{VOCABULARY}"
    return estimate(arch=model, method="full", stack=stack, bs=1, seq=length).peak.nbytes


def test_the_older_loss_holds_one_more_copy_of_the_fp32_logits() -> None:
    assert peak("megatron-2024") - peak("megatron") == 4 * LENGTH * VOCABULARY


def test_nemo_rls_log_probabilities_hold_what_their_operations_make() -> None:
    """DistributedLogprob: fp32 logits, minus their maximum, and log-probabilities are alive together,
    then probabilities for the second. Before 0.4 the backward had probabilities and two int64 copies."""

    def of_a_logit(stack: str) -> float:
        return (peak(stack, 2 * LENGTH) - peak(stack)) / (LENGTH * VOCABULARY)

    found = {stack: of_a_logit(stack) for stack in ("megatron", "nemo-rl", "nemo-rl-0.3")}
    assert found == pytest.approx({"megatron": 6, "nemo-rl": 12, "nemo-rl-0.3": 20}, rel=0.05)


def test_slimes_loss_holds_the_logits_and_their_probabilities_and_copies_of_both_before() -> None:
    """slime#1951: `logits.clone()` ran out; get_log_probs_and_entropy before and after 6a0ee158."""

    def of_a_logit(stack: str) -> float:
        return (peak(stack, 2 * LENGTH) - peak(stack)) / (LENGTH * VOCABULARY)

    found = {stack: of_a_logit(stack) for stack in ("slime", "slime-unfused", "slime-2025")}
    assert found == pytest.approx({"slime": 8, "slime-unfused": 8, "slime-2025": 16}, rel=0.05)


def test_the_gradient_of_one_hot_labels_does_not_fit_where_the_later_one_may() -> None:
    """NVIDIA-NeMo/RL#903: 32,768 tokens of a Qwen 1.5B over 2 context ranks ran out of memory on H100,
    over 4 they ran."""
    given: dict[str, object] = {"gpus": "8xH100", "data_parallel": "zero1", "seq": 32768, "bs": 1}
    verdicts = {
        ranks: estimate(
            "qwen2.5-1.5b", method="full", stack="nemo-rl-0.3", cp=ranks, precision="bf16", **given
        ).verdict.value
        for ranks in (2, 4)
    }
    assert verdicts == {2: "does not fit", 4: "fits"}


# Two tensor ranks: logits, log-probabilities and what goes from one to the other; or logits,
# probabilities and two int64 copies. One rank: log-probabilities and two gradients of 4 bytes, before
# 0.4 beside the logits.
FOUND = {
    ("nemo-rl-dtensor", 2): 12,
    ("nemo-rl-dtensor-0.3", 2): 24,
    ("nemo-rl-dtensor", 1): 12,
    ("nemo-rl-dtensor-0.3", 1): 16,
}


@pytest.mark.parametrize("sequence_parallel", [None, False])
def test_over_dtensor_nemo_rls_loop_kept_fp32_logits_and_its_tensor_ranks_their_labels(
    sequence_parallel: bool | None,
) -> None:
    """v0.3.0 models/policy/dtensor_policy_worker.py train, whose logits v0.4.0 deletes before the
    backward (2b87def7); FSDP2's output_dtype is float32. The head stays split where norms are whole (models/dtensor/parallelize.py _parallelize_llama)."""

    def of_a_logit(stack: str, ranks: int) -> float:
        model, given = f"L2 h256 a4 kv2 f704 v{VOCABULARY}", {"precision": "bf16", "loss": "hf"}
        if sequence_parallel is not None and ranks > 1:
            given["sequence_parallel"] = sequence_parallel
        few, many = (
            estimate(
                arch=model, method="full", stack=stack, bs=1, seq=length, gpus=2, tp=ranks, **given
            ).peak.nbytes
            for length in (LENGTH, 2 * LENGTH)
        )
        return (many - few) / (LENGTH * VOCABULARY / ranks)

    found = {row: of_a_logit(*row) for row in FOUND}
    assert found == pytest.approx(FOUND, rel=0.05)


def test_nemo_rl_of_2025_repeats_keys_so_that_fp32_attention_holds_no_scores() -> None:
    """NeMo-RL v0.2.1 and v0.3.0 uv.lock: transformers 4.51.3 and 4.52.4, whose SDPA gets whole heads
    (models/layers/attend.py); NVIDIA-NeMo/RL#362 ran so in fp32."""
    model, given = (
        "L2 h256 a4 kv2 f704 v1024",
        {"precision": "fp32", "checkpointing": "none"},
    )
    scores = 4 * 4 * LENGTH * LENGTH  # heads, bytes, tokens and tokens
    today, then = (
        estimate(
            arch=model, method="full", stack=stack, bs=1, seq=LENGTH, gpus=2, **given
        ).peak.nbytes
        for stack in ("nemo-rl-dtensor", "nemo-rl-dtensor-0.3")
    )
    assert today - then > scores


# Log-probabilities and two gradients in the type of the logits, 2 bytes each; before transformers 4.46
# in fp32, and of two sequences fp32 logits, their copy in rows and log-probabilities beside 16-bit ones.
LOG_SOFTMAX = {("hf-4.48", 1): 6, ("hf-4.48", 2): 6, ("hf-4.45", 1): 12, ("hf-4.45", 2): 14}


@pytest.mark.parametrize(("stack", "rows"), LOG_SOFTMAX)
def test_openrlhf_took_log_softmax_of_all_logits_until_2025(stack: str, rows: int) -> None:
    """OpenRLHF v0.5.0 models/utils.py log_probs_from_logits."""
    few, many = (
        estimate(
            arch=f"L2 h256 a4 kv2 f704 v{VOCABULARY}",
            **{"method": "full", "workload": "grpo", "rollout": "none", "loss": "hf"},
            **{"rollout_trainer": "openrlhf-0.5", "reference": False, "old_logprobs": False},
            **{"stack": stack, "precision": "bf16", "bs": rows, "seq": length},
        ).peak.nbytes
        for length in (LENGTH // 2, LENGTH)
    )
    slope = (many - few) / (rows * LENGTH // 2 * VOCABULARY)
    assert slope == pytest.approx(LOG_SOFTMAX[stack, rows], rel=0.05)


def test_prime_rl_of_2025_computes_the_entropy_of_whole_fp32_logits() -> None:
    """PrimeIntellect-ai/prime-rl#1097: logits, a shifted copy, probabilities and their products."""
    few, many = (
        estimate(
            arch=f"L2 h256 a4 kv2 f704 v{VOCABULARY}",
            **{"method": "full", "workload": "grpo", "rollout": "none", "loss": "hf"},
            **{
                "stack": "prime-rl-rollouts-2025",
                "rollout_trainer": "prime-rl",
                "bs": 1,
                "seq": length,
            },
        ).peak.nbytes
        for length in (LENGTH, 2 * LENGTH)
    )
    assert (many - few) / (LENGTH * VOCABULARY) == pytest.approx(16, rel=0.05)
