"""ALBERT against the traced step: layers that run one set of weights, whose gradients, adapters and
copies under autocast are there once."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from agreement_matrix import compare
from analytic_vs_traced import Case

CONFIG = {
    "model_type": "albert",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 3000,
    "embedding_size": 128,
    "num_hidden_layers": 5,
}
GROUPS = {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
TOLERANCE = 0.001  # less than a hidden state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ending", "method", "own", "more"),
    [
        ("MaskedLM", "full", {}, {}),
        ("MaskedLM", "full", {}, {"precision": "bf16-amp"}),
        ("MaskedLM", "qlora", GROUPS, {"attention": "auto"}),
        ("SequenceClassification", "full", {}, {}),
        ("TokenClassification", "full", GROUPS, {}),
        ("QuestionAnswering", "full", {}, {}),
    ],
)
def test_the_peak_is_that_of_the_traced_step(
    ending: str, method: str, own: dict[str, int], more: dict[str, str]
) -> None:
    config = {**CONFIG, **own, "architectures": [f"AlbertFor{ending}"]}
    case = Case(config=config, method=method, optimizer="adamw-fused", **more)
    cell = compare("albert", case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.difference:+.3%}"
