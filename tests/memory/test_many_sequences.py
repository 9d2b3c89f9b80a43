"""Micro-steps of very many sequences, and an evaluation of a model whose head is trained whole."""

from __future__ import annotations

import pytest
from napkinmath.inputs.jobs import priced
from napkinmath.memory.varied_lengths import MOST_DRAWN, micro_step_lengths

SAMPLE = [10, 20, 30, 40]


def test_the_longest_of_very_many_sequences_is_the_sample_s_longest() -> None:
    assert set(micro_step_lengths(SAMPLE, 10**9, 0)) == {40}


def test_both_ways_to_draw_agree_where_they_meet() -> None:
    """Of 4,096 lengths the mean of the longest lies at n / (n + 1) of the sample."""
    sample = list(range(1, 4097))
    for batch in (MOST_DRAWN, MOST_DRAWN + 1):
        drawn = micro_step_lengths(sample, batch, 0, count=64)
        expected = 4096 * batch / (batch + 1)
        assert sum(drawn) / len(drawn) == pytest.approx(expected, rel=0.001)


def test_an_evaluation_has_no_gradients_of_a_head_beside_adapters() -> None:
    options = {"model": "bert-base", "task": "sequence-classification", "method": "lora"}
    (e,) = priced({**options, "eval_bs": 2, "ctx": 32}, [])
    names = [s.name for _, s in e.timeline.segments.counted() if s.name.startswith("evaluation")]
    assert names and not any("gradient" in name for name in names)
