"""Sequences of several lengths in one estimate: padded to the longest of their batch, or packed."""

from __future__ import annotations

import random

import pytest
from napkinmath.base.expr import Bindings
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import AdapterConfig, Attention, Batch, TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.costs import AttentionCost as AttentionCost
from napkinmath.memory.varied_lengths import longest_lengths

LENGTHS = (256, 512, 1024, 2048)


def priced(**fields: object) -> Estimate:
    fields.setdefault("adapter", AdapterConfig())
    return estimate("llama-3.2-1b", TrainConfig(micro_batch_size=4, **fields), hardware="A100-80")  # type: ignore[arg-type]


def attention_flops(e: Estimate) -> int:
    bind = Bindings(e.step.symbols)
    costs = [
        (run.count, cost)
        for run in e.step.runs
        for op in run.block.ops
        for cost in op.costs
        if isinstance(cost, AttentionCost)
    ]
    return sum(count * bind(cost.flops) for count, cost in costs)


def test_packed_attention_is_the_sum_of_squares_not_the_square_of_the_sum() -> None:
    full, packed = priced(), priced(batch=Batch(packing=True, lengths=LENGTHS))
    share = (
        sum(length**2 for length in LENGTHS) / sum(LENGTHS) / 2048
    )  # of the tokens' mean own length
    assert attention_flops(packed) / attention_flops(full) == pytest.approx(share, rel=0.01)


def test_a_kernel_that_masks_packed_sequences_computes_the_square() -> None:
    masked = priced(batch=Batch(packing=True, lengths=LENGTHS), attention=Attention.SDPA)
    assert attention_flops(masked) == 2 * attention_flops(priced())  # nor is causality used


def test_the_mask_of_packed_sequences_lies_in_memory() -> None:
    """(b, 1, s, s) bools, and an additive form of it where a fused kernel is given one."""
    masked = priced(batch=Batch(packing=True), attention=Attention.SDPA)
    made = [t for t in masked.timeline.tensors if t.name == "mask of packed sequences"]
    assert [t.nbytes for t in made] == [4 * 2048 * 2048]


def test_the_peak_of_padded_batches_is_that_of_the_longest() -> None:
    assert (
        priced(batch=Batch(lengths=(100, 700)), sequence_length=2048).memory.requested
        == priced(sequence_length=700).memory.requested
    )


def test_longer_sequences_are_cut() -> None:
    assert priced(batch=Batch(lengths=(100, 9000))).memory.requested == priced().memory.requested


def test_padding_is_computed_and_not_counted() -> None:
    alike, mixed = priced(batch=Batch(lengths=(2048,))), priced(batch=Batch(lengths=LENGTHS))
    plain = priced()
    assert alike.time is not None and mixed.time is not None and plain.time is not None
    assert alike.time.seconds == pytest.approx(plain.time.seconds, rel=1e-6)
    assert alike.time.tokens == plain.time.tokens
    assert mixed.time.tokens == sum(LENGTHS)
    assert mixed.time.seconds < plain.time.seconds
    assert mixed.time.tokens_per_s < 0.8 * plain.time.tokens_per_s


@pytest.mark.parametrize(
    "engine", [kind for kind in DataParallel if kind not in (DataParallel.NONE, DataParallel.DP)]
)
def test_each_micro_step_of_an_engine_has_its_place_in_a_step(engine: DataParallel) -> None:
    """Engines make the first micro-step, those between and the last differently; played in another
    order their books do not balance."""
    spread = ParallelConfig(data_parallel=engine, data_parallel_size=2)
    alike, changing = (
        priced(
            batch=Batch(lengths=lengths),
            gradient_accumulation_steps=5,
            sequence_length=2048,
            adapter=None,
            parallel=spread,
        )
        for lengths in ((2048,), LENGTHS)
    )
    fixed = priced(
        gradient_accumulation_steps=5, sequence_length=2048, adapter=None, parallel=spread
    )
    assert alike.time is not None and changing.time is not None and fixed.time is not None
    assert alike.time.seconds == pytest.approx(fixed.time.seconds, rel=0.01)
    assert changing.time.seconds < fixed.time.seconds
    assert len({phase.phase for phase in changing.time.phases}) == len(changing.time.phases)


def test_stages_exchange_tensors_of_one_shape() -> None:
    """torch.distributed.pipelining allocates receive buffers once: every batch is padded to the
    longest, and padding is not counted."""
    staged = ParallelConfig(data_parallel_size=1, pipeline_parallel_size=2)
    fixed, mixed = (
        priced(
            batch=Batch(lengths=n),
            gradient_accumulation_steps=4,
            sequence_length=2048,
            parallel=staged,
        )
        for n in ((), LENGTHS)
    )
    assert fixed.time is not None and mixed.time is not None
    assert (
        mixed.time.seconds == pytest.approx(fixed.time.seconds)
        and mixed.memory.reserved.value == fixed.memory.reserved.value
    )
    assert mixed.time.tokens == pytest.approx(
        fixed.time.tokens * sum(LENGTHS) / (len(LENGTHS) * max(LENGTHS))
    )


def test_ranks_that_gather_wait_for_the_longest_sequence_of_all() -> None:
    one, many = (
        priced(
            batch=Batch(lengths=(128,) * 15 + (2048,)),
            adapter=None,
            parallel=ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=n),
        )
        for n in (2, 64)
    )
    assert one.time is not None and many.time is not None
    assert longest_lengths(LENGTHS, 1, 4) == list(LENGTHS) and set(
        longest_lengths(LENGTHS, 4096)
    ) == {max(LENGTHS)}
    assert many.time.hardware_flops > 1.8 * one.time.hardware_flops


def test_every_order_holds_what_the_longest_batch_requests() -> None:
    """Of two batches of the longest length in turn, which an order may not have."""
    draw = random.Random(8)
    for _ in range(2):
        lengths = [draw.randint(30, 1023) for _ in range(60)]
        options = {"lengths": lengths, "ctx": 1024, "bs": 1, "grad_accum": 16, "method": "lora"}
        e = estimate("qwen-1.8b", checkpointing="full", **options)
        assert min(books.peak_allocated for books in e.replays) >= e.peak.nbytes
        assert e.memory.requested <= e.memory.allocated.value
