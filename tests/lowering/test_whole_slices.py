"""`logits[..., :-1, :]` in torch of 2022 to 2025: `:` is a slice too, whose backward writes zeros,
and odd vocabularies round to segments of two sizes."""

from __future__ import annotations

from napkinmath import estimate
from napkinmath.base.cuda import LARGE_ROUNDING
from napkinmath.config.train_config import Attention, Precision
from published.stacks import PUBLISHED

BATCH, LENGTH = 4, 512


def reserved(vocabulary: int, stack: str) -> int:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": vocabulary,
    }
    found = estimate(
        config,
        micro_batch_size=BATCH,
        sequence_length=LENGTH,
        stack=stack,
        attention=Attention.FLASH2,
        precision=Precision.BF16,
    )
    return found.replay.peak_reserved


def test_an_added_token_costs_a_whole_copy_of_the_logits_under_the_loss_in_place() -> None:
    """fms-acceleration's runs on Mistral (32001 rows) held 2.1 GB more at batch 4 than 32000 rows
    would, on Granite (49152) not."""
    logits = BATCH * LENGTH * 32000 * 4
    assert (
        (BATCH * LENGTH * 32001 * 4) % LARGE_ROUNDING < LARGE_ROUNDING // 2
    )  # the whole just spills into one more unit, the shifted copy does not
    foak = PUBLISHED["hf-4.45-foak"].name
    in_place = reserved(32001, foak) - reserved(32000, foak)
    plain = reserved(32001, "hf-4.45") - reserved(32000, "hf-4.45")
    assert 0.95 * logits < in_place < 1.1 * logits
    assert abs(plain) < 0.1 * logits


def grads_of_logits(stack: str) -> int:
    found = estimate("llama-7b", stack=stack, micro_batch_size=2, sequence_length=512)
    return [tensor.name for tensor in found.timeline.tensors].count("grad of output in fp32")


def test_todays_torch_slices_once() -> None:
    assert grads_of_logits("hf") <= 1
    assert grads_of_logits("hf-4.45") == 2


def test_shifted_logits_of_one_sequence_lie_in_a_row() -> None:
    """`.contiguous()` copies nothing where the batch is 1: torch's is_contiguous skips strides of
    axes of 1."""

    def copies(batch: int) -> int:
        found = estimate("llama-7b", stack="hf-4.45", micro_batch_size=batch, sequence_length=512)
        return [tensor.name for tensor in found.timeline.tensors].count("shifted logits")

    assert (copies(1), copies(2)) == (0, 1)
