"""Experts that axolotl packs while it loads a model, against bitsandbytes' own parametrization on meta
tensors: the packed bytes, the copy of each product, and how long it lives."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from agreement.mixed_configs import MIXED
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath.ir.ledger import Phase

TOLERANCE = 0.002  # scalars and counters of the router, beside a step of 4 MB
# Without checkpointing every layer's unpacked copy is kept. gpt-oss is 4% off under checkpointing,
# its experts packed or not, so that its test would show nothing of them.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LEARNED: dict[str, object] = {
    "model_type": "exaone_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "sliding_window": 4096,
}
CASES = [
    ("mixtral", False),
    ("mixtral", True),
    ("qwen3_moe", True),
    ("gpt_oss", False),
]


@pytest.mark.parametrize(("family", "checkpointing"), CASES)
def test_packed_experts_are_as_bitsandbytes_parametrizes_them(
    family: str, checkpointing: bool
) -> None:
    case = Case(
        config=MIXED[family],
        method="qlora",
        precision="bf16-autocast",
        checkpointing=checkpointing,
        attention="eager" if family == "gpt_oss" else "sdpa_flash",
        targets=ATTENTION,
        kbit=False,
        experts=True,
    )
    cell = compare(family, case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"
    # between steps there is what is stored: 4 KB of scalars that each optimizer step makes
    at_rest = cell.analytic[Phase.STEP], cell.traced[Phase.STEP]
    assert at_rest[0] == pytest.approx(at_rest[1], abs=4096)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_learned_model_unpacks_its_experts_too(checkpointing: bool) -> None:
    """What packing saves, or costs where every copy is kept, to the byte. The step itself is not
    compared: this tiny config's other parts are not those that were learned."""
    saved: list[tuple[int, int]] = []
    for experts in (False, True):
        case = Case(
            config=LEARNED,
            method="qlora",
            precision="bf16-autocast",
            checkpointing=checkpointing,
            targets=ATTENTION,
            kbit=False,
            experts=experts,
        )
        cell = compare("exaone_moe", case)
        saved.append((cell.analytic[Phase.BACKWARD], cell.traced[Phase.BACKWARD]))
    (whole, traced_whole), (packed, traced_packed) = saved
    assert packed - whole == traced_packed - traced_whole
