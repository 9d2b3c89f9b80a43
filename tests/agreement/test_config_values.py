"""Values of a config that switch a part of the model: both paths read them alike, and a config that
today's transformers has saved again answers as the first."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath import TrainConfig, estimate
from napkinmath.models.families import read_config
from transformers import AutoConfig

TOLERANCE = 0.001

SWITCHES: list[tuple[str, dict[str, object]]] = [
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("vaultgemma", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("bert", {"tie_word_embeddings": False}),
    ("roberta", {"tie_word_embeddings": False}),
    ("distilbert", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("family", "changed"), SWITCHES, ids=str)
def test_both_paths_read_a_switch(family: str, changed: dict[str, object]) -> None:
    config = {**TINY[family], **changed}
    case = Case(config=config, attention="auto", optimizer="adamw-fused")
    assert abs(compare(family, case).difference) <= TOLERANCE


@pytest.mark.parametrize(
    "family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gemma2"]
)
def test_a_config_saved_again_answers_alike(family: str) -> None:
    values = dict(TINY[family])
    saved = AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    first, again = (
        estimate(read_config(config), TrainConfig()).peak.nbytes for config in (TINY[family], saved)
    )
    assert first == again
