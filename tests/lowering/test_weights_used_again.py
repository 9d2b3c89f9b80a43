"""Weights that run several times in a step under autocast: what is freed was there."""

from __future__ import annotations

import pytest
from napkinmath import estimate

ALBERT = {
    "model_type": "albert",
    "architectures": ["AlbertForMaskedLM"],
    "vocab_size": 1000,
    "embedding_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("model", "workload"), [(ALBERT, "sft"), ("all-minilm-l6-v2", "contrastive")]
)
@pytest.mark.parametrize("how", [{}, {"checkpointing": "full"}, {"grad_accum": 2}, {"lora": True}])
def test_the_replay_ends(model: object, workload: str, how: dict[str, object]) -> None:
    found = estimate(model, bs=4, ctx=64, precision="bf16-amp", workload=workload, **how)
    assert found.memory.device.value >= found.peak.nbytes
    assert str(found)
