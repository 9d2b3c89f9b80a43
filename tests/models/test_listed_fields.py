"""Lists of a config that say something of each layer: cut short, grown or emptied, they are read as
the model says or refused, for every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.catalog.models import load_rows
from napkinmath.models.families import FAMILIES, read_config

TYPES = ["full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "attention"]
FIELDS: dict[str, list[Any]] = {
    "layer_types": TYPES,
    "layers_block_type": TYPES,
    "mlp_layer_types": ["dense", "sparse"],
    "attention_types": [[["global", "local"], 1]],
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "mlp_only_layers": [1],
    "attn_layer_indices": [1],
    "full_attn_idxs": [1],
    "cross_attention_layers": [1],
}


def configs() -> list[dict[str, Any]]:
    """A published config of each model type."""
    found = {row["config"]["model_type"]: row["config"] for row in load_rows()}
    return [found[kind] for kind in sorted(found) if kind in FAMILIES]


def texts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configs that number layers: its own, and its nested ones."""
    return [config, *(value for value in config.values() if isinstance(value, dict))]


def read_or_refused(config: dict[str, Any]) -> None:
    try:
        spec = read_config(config)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all(stage.count >= 1 for stage in spec.stages)


@pytest.mark.slow
@pytest.mark.parametrize("config", configs(), ids=lambda config: config["model_type"])
def test_lists_of_another_length(config: dict[str, Any]) -> None:
    for number, own in enumerate(texts(config)):
        for field, words in FIELDS.items():
            whole = own.get(field) or words
            for value in (whole[:1], whole[:-1], [*whole, whole[-1]], [*whole, 10**6], [words[0]]):
                changed = copy.deepcopy(config)
                texts(changed)[number][field] = value
                read_or_refused(changed)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("gpt_oss", "layer_types", ["full_attention"]),
        ("gpt_oss", "layer_types", ["full_attention", "sliding"]),
        ("llama4_text", "no_rope_layers", [1]),
        ("llama4_text", "moe_layers", [0, 2]),
        ("smollm3", "no_rope_layers", [1]),
        ("qwen3_moe", "mlp_only_layers", [7]),
        ("qwen3_next", "layer_types", ["full_attention", "mamba"]),
        ("bamba", "attn_layer_indices", [5]),
        ("mllama_text_model", "cross_attention_layers", [2]),
    ],
)
def test_what_disagrees_with_the_layers_is_named(kind: str, field: str, value: list[Any]) -> None:
    """Two layers, as wide as a test needs."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 100, "num_hidden_layers": 2}
    sizes |= {"num_experts": 16, "num_local_experts": 16, "moe_intermediate_size": 32}
    with pytest.raises(InputError, match=field):
        read_config({"model_type": kind, **sizes, field: value})
