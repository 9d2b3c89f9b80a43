"""Masks and biases at lengths that are no multiple of 8, and head sizes that are none: both paths
pad what torch pads (aten/src/ATen/native/transformers/attention.cpp pad_bias, pad_last_dim)."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath import TrainConfig, estimate
from napkinmath.catalog.stacks import STACKS
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath.planning.sweep import sweep

TOLERANCE = 0.0005  # of activations: rounding, a counter, the loss
CHUNKED = 0.004  # the experts' counters beside it
BATCH = 4
LENGTHS = range(320, 384)  # every remainder by 64

# Values of one row, and how many rows a layer's copy has, of the families that give SDPA a mask.
ROWS = {"falcon_rw": BATCH * 8, "mistral_window": BATCH, "t5": 4, "modernbert": BATCH}
HEADS = {
    "model_type": "llama",
    **TINY["llama"],
    "hidden_size": 400,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def padded_copies(family: str, length: int) -> list[int]:
    """Bytes of each padded copy of one step's forward."""
    config = TrainConfig(micro_batch_size=BATCH, sequence_length=length)
    step = build_step(read_config(TINY[family]), Policy(config, STACKS["hf-bare"]))
    made = [t for t in simulate(step, steps=1).tensors if t.name == "pad"]
    return [t.nbytes for t in made]


@pytest.mark.parametrize("family", ROWS)
def test_rows_of_a_mask_start_on_eight_values_at_every_length(family: str) -> None:
    for length in LENGTHS:
        copies = padded_copies(family, length)
        assert bool(copies) == (length % 8 > 0), length
        row = -(-length // 8) * 8
        assert set(copies) <= {ROWS[family] * length * row * 2}, length


@pytest.mark.parametrize("family", ROWS)
def test_a_sweep_over_every_length_gives_each_estimates_bytes(family: str) -> None:
    """One record holds for lengths with the same remainder alone."""
    spec = read_config(TINY[family])
    config = TrainConfig(micro_batch_size=BATCH)
    swept = sweep(spec, config, sequence_length=np.array(LENGTHS[:16])).requested
    for length, found in zip(LENGTHS[:16], swept, strict=True):
        e = estimate(spec, config.replace(sequence_length=length))
        assert e.peak.nbytes == found, length


@pytest.mark.parametrize(("length", "batch"), [(333, 4), (340, 3), (381, 4)])
@pytest.mark.parametrize("family", ROWS)
def test_odd_lengths_agree_with_the_traced_step(family: str, length: int, batch: int) -> None:
    case = Case(
        config=TINY[family],
        attention="auto",
        sequence=length,
        batch=batch,
        optimizer="adamw-fused",
    )
    assert abs(compare(family, case).difference) <= TOLERANCE


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_key_value_heads": 2},
        {"model_type": "mistral", "sliding_window": 48},
        {"head_dim": 320, "num_key_value_heads": 2},
    ],
    ids=str,
)
def test_odd_head_sizes_agree_with_the_traced_step(changed: dict[str, object]) -> None:
    """100, which flash pads and the efficient kernel does not take; 320, which flash does not."""
    case = Case(
        config={**HEADS, **changed},
        attention="auto",
        sequence=333,
        batch=4,
        optimizer="adamw-fused",
    )
    assert abs(compare(str(changed), case).difference) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "width"),
    [
        ("gpt2_no_dropout", "n_embd"),
        ("gpt_neox", "hidden_size"),
        ("gptj", "n_embd"),
        ("opt", "hidden_size"),
        ("falcon_7b", "hidden_size"),
    ],
)
def test_families_agree_at_a_head_size_of_twenty(family: str, width: str) -> None:
    case = Case(
        config={**TINY[family], width: 160},
        attention="auto",
        sequence=333,
        batch=4,
        optimizer="adamw-fused",
    )
    assert abs(compare(family, case).difference) <= TOLERANCE


@pytest.mark.parametrize("length", [1000, 1024])
def test_chunks_of_the_gated_delta_rule_in_fp32(length: int) -> None:
    """Padding to whole chunks lays the rows of fp32 inputs out, which products copied once more:
    7.7% of this QLoRA's peak. Whole chunks are not padded."""
    config = {
        **TINY["qwen3_next"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    case = Case(
        config=config,
        method="qlora",
        attention="auto",
        sequence=length,
        optimizer="adamw-fused",
    )
    assert abs(compare("qwen3_next", case).difference) <= CHUNKED
