"""Lightning attention at lengths of one, two and several blocks, the last of them cut short."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import numpy as np
from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath import TrainConfig, estimate
from napkinmath.models.families import read_config
from napkinmath.planning.sweep import sweep

# Counters, the loss and a few temporaries of 512 B; one product of a block is ten times that.
TOLERANCE = 0.001
BLOCK = 48
# Attention is most of a layer, so that what a block keeps is most of the peak.
CONFIG = {
    **TINY["minimax"],
    "intermediate_size": 16,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "num_attention_heads": 8,
    "block_size": BLOCK,
}


@pytest.mark.parametrize(
    ("length", "batch", "method", "checkpointing"),
    [
        (17, 2, "full", False),
        (BLOCK + 1, 2, "lora", True),
        (333, 2, "full", True),
        (333, 1, "lora", False),
    ],
)
def test_the_peak_is_that_of_the_traced_step(
    length: int, batch: int, method: str, checkpointing: bool
) -> None:
    case = Case(
        config=CONFIG,
        method=method,
        checkpointing=checkpointing,
        attention="auto",
        batch=batch,
        sequence=length,
        optimizer="adamw-fused",
    )
    cell = compare("minimax", case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"


def test_a_sweep_over_blocks_gives_each_estimates_bytes() -> None:
    spec, config = read_config(CONFIG), TrainConfig(micro_batch_size=2)
    lengths = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7]
    swept = sweep(spec, config, sequence_length=np.array(lengths)).requested
    for length, found in zip(lengths, swept, strict=True):
        alone = estimate(spec, config.replace(sequence_length=length))
        assert alone.peak.nbytes == found, length
