"""Steps, hours and money of a whole run, by flags, keywords and the trainers' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import napkinmath
import pytest
from napkinmath.config.run_length import RunLength
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

TINY: dict[str, Any] = {"model": "gpt2", "gpu": "T4", "ctx": 128, "precision": "fp16-amp"}


def steps(**given: Any) -> int:
    """Of GPT-2 on a T4."""
    run = napkinmath.estimate(**{**TINY, **given}).whole_run
    assert run is not None
    return run.steps


@pytest.mark.parametrize(
    ("samples", "rows", "micro_steps", "epochs", "found"),
    [
        (52_002, 8, 4, 3.0, 4_878),  # 6,501 batches, 1,626 steps an epoch
        (100, 8, 4, 1.0, 4),  # 13 batches: the last step accumulates one
        (100, 8, 4, 2.5, 10),
        (1, 8, 4, 1.0, 1),
        (100, 1, 1, 0.105, 11),
    ],
)
def test_steps_are_those_of_the_trainer(
    samples: int, rows: int, micro_steps: int, epochs: float, found: int
) -> None:
    assert RunLength(samples=samples, epochs=epochs).steps(rows, micro_steps) == found


def test_gpus_share_the_samples_and_max_steps_counts_before_them() -> None:
    assert steps(samples=1000, bs=4) == 250
    assert steps(samples=1000, bs=4, grad_accum=2, epochs=2) == 250
    assert steps(samples=1000, bs=4, gpu=None, gpus="8xT4", data_parallel="ddp") == 32
    assert steps(samples=1000, bs=4, max_steps=7) == 7
    assert steps(samples=1000, bs=4, workload="dpo") == 250  # a pair is one sample
    assert steps(samples=1000, bs=4, packing=True, lengths="64") == 125


def test_packed_samples_of_unknown_lengths_are_not_counted() -> None:
    e = napkinmath.estimate(**TINY, samples=1000, packing=True)
    assert e.whole_run is None
    assert any("packed rows" in finding.text for finding in e.findings)
    assert napkinmath.estimate(**TINY).whole_run is None


def test_hours_are_steps_times_seconds() -> None:
    e = napkinmath.estimate(**{**TINY, "gpu": None}, gpus="8xT4", data_parallel="ddp", max_steps=50)
    run, whole = e.whole_run, e.throughput
    assert run is not None and whole is not None
    assert run.seconds == pytest.approx(50 * whole.seconds) and run.tokens == 50 * whole.tokens
    assert run.gpu_hours == pytest.approx(run.seconds / 3600 * 8)
    assert run.fastest_s <= run.seconds <= run.slowest_s


FILES = {
    "axolotl": ("base_model: gpt2\nsequence_len: 128\nnum_epochs: 3\n", 3.0, 0),
    "Trainer": ("model_name_or_path: gpt2\nmax_steps: 300\noptim: adamw_torch\n", 1.0, 300),
    "off": ("model_name_or_path: gpt2\nmax_steps: -1\noptim: adamw_torch\n", 1.0, 0),
    "gpt-neox": (
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 64\n"
        "max_position_embeddings: 64\npos_emb: rotary\ntrain_micro_batch_size_per_gpu: 1\n"
        "pipe_parallel_size: 0\ntrain-iters: 320000\n",
        1.0,
        320_000,
    ),
}


@pytest.mark.parametrize("tool", FILES)
def test_files_say_how_long_they_run(tmp_path: Path, tool: str) -> None:
    text, epochs, max_steps = FILES[tool]
    job = tmp_path / "job.yaml"
    job.write_text(text, encoding="utf-8")
    e = priced(with_job_file({"job": str(job)}, []), [])[0]
    assert e.config.run == RunLength(epochs=epochs, max_steps=max_steps)
    given = priced(with_job_file({"job": str(job), "samples": 80, "epochs": 2}, []), [])[0]
    assert given.config.run == RunLength(samples=80, epochs=2.0)
