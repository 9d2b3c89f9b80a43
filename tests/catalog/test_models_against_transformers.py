"""Every row of the model catalog is well formed, and its parameter count is that of the real
`transformers` model."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from napkinmath.catalog.engines import SERVED_FORMATS
from recount_models import CATALOG, count_parameters, lacks_timm, read_catalog

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS = read_catalog()
KEYS = ["name", "aliases", "hub_id", "family", "class", "config", "parameters", "source"]


def plain(name: str) -> str:
    """The name as look-ups compare it: without its owner, in lower case, any punctuation as one
    dash (opt-1.3b is not opt-13b)."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().rsplit("/", 1)[-1]).strip("-")


def is_built_by_transformers(config: dict[str, Any]) -> bool:
    """Whether the model is what `transformers` builds: its MPT has neither the biases nor the
    learned positions of llm-foundry's."""
    return config["model_type"] in transformers.CONFIG_MAPPING and not config.get("learned_pos_emb")


def names_of(row: dict[str, Any]) -> list[str]:
    hub_names = [row["hub_id"]] if row["hub_id"] else []
    return [row["name"], *row["aliases"], *hub_names]


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_parameters_are_those_of_the_transformers_model(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [key for key in row if key != "stored"] == KEYS
    assert row.get("stored", "fp8") in SERVED_FORMATS
    assert row["parameters"] > 0 and row["source"] and row["config"]["model_type"]
    if row["config"]["model_type"] == row["class"]:
        return  # of diffusers, whose parameters benchmarks/accuracy/denoisers.py counts
    if row["class"] is None:
        assert not is_built_by_transformers(row["config"]), (
            "transformers builds this model: count it"
        )
        return
    assert row["config"]["architectures"] == [row["class"]]
    if lacks_timm(row):
        pytest.skip("timm builds its tower; tests/agreement/test_gemma3n.py counts it")
    if row["config"]["model_type"] == "videomae":  # a table of no parameters, seconds in Python
        from transformers.models.videomae import modeling_videomae

        empty = functools.partial(modeling_videomae.torch.empty, 1)
        monkeypatch.setattr(modeling_videomae, "get_sinusoid_encoding_table", empty)
    assert count_parameters(row) == row["parameters"]


def test_no_two_models_answer_to_one_name() -> None:
    owners: dict[str, set[str]] = {}
    for row in ROWS:
        for name in names_of(row):
            owners.setdefault(plain(name), set()).add(row["name"])
    assert {name: models for name, models in owners.items() if len(models) > 1} == {}


def test_rows_go_by_family_then_size_one_a_line() -> None:
    families = list(dict.fromkeys(row["family"] for row in ROWS))
    assert sorted(ROWS, key=lambda row: (families.index(row["family"]), row["parameters"])) == ROWS
    assert len(CATALOG.read_text(encoding="utf-8").splitlines()) == len(ROWS) + 2
    assert max(Counter(row["name"] for row in ROWS).values()) == 1
