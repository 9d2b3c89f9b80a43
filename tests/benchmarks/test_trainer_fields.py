"""The cross-check of job files tells a field that is read wrong from one that is read right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "accuracy"))
    import trainer_fields

    yield trainer_fields
    sys.modules.pop("trainer_fields", None)


@pytest.mark.parametrize(
    ("field", "raw", "right", "wrong"),
    [
        ("micro-batch", 4, {"bs": 4}, {"bs": 2}),
        ("model", "/tmp/Qwen3-8B/", {"model": "Qwen/Qwen3-8B"}, {"model": "qwen3-4b"}),
        ("4 bits", True, {"quant": "nf4"}, {"quant": "int8"}),
        ("8 bits", False, {"quant": "nf4"}, {"quant": "int8"}),
        ("precision", "bf16-true", {"precision": "bf16"}, {"precision": "fp16-amp"}),
        (
            "optimizer",
            "paged_adamw_8bit",
            {"optimizer": "paged-adamw-8bit"},
            {"optimizer": "adamw"},
        ),
        ("checkpointing", True, {"checkpointing": "full"}, {}),
        ("checkpointing", False, {}, {"checkpointing": "full"}),
        ("GPUs", 8, {"gpus": 8}, {}),
    ],
)
def test_a_field_agrees_or_not(fields, field, raw, right, wrong) -> None:  # type: ignore[no-untyped-def]
    assert fields.agrees(field, raw, right)
    assert not fields.agrees(field, raw, wrong)


def test_a_file_is_walked_by_its_own_keys(fields, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job = tmp_path / "job.yaml"
    job.write_text(
        "base_model: llama-3.2-1b\nmicro_batch_size: 2\nsequence_len: 512\nadapter: lora\n"
        "lora_r: 8\nlora_target_linear: true\ngradient_accumulation_steps: ${x}\n"
    )
    found = fields.compared("axolotl", job, {})
    assert {field: same for field, (_, _, same) in found.items()} == {
        "model": True,
        "micro-batch": True,
        "length": True,
        "rank": True,
    }
