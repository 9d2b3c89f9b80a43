"""LoRA on the experts' own parameters (PEFT's `target_parameters`), against PEFT on meta tensors."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from agreement.mixed_configs import MIXED
from agreement_matrix import compare
from analytic_vs_traced import Case

TOLERANCE = 0.002  # scalars and counters of the router, beside a step of 4 MB
NAMED = ("q_proj", "v_proj", "experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("family", "method", "checkpointing"),
    [("qwen3_moe", "lora", False), ("mixtral", "lora", True), ("gpt_oss", "lora", False)],
)
def test_named_parameters_have_one_rank_each(family: str, method: str, checkpointing: bool) -> None:
    case = Case(
        config=MIXED[family],
        method=method,
        precision="bf16-autocast",
        checkpointing=checkpointing,
        attention="eager" if family == "gpt_oss" else "sdpa_flash",
        targets=NAMED,
    )
    cell = compare(family, case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"
