"""Every model of the catalog that a family reads has the parameters that its row records, which the
real class was counted for."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.answers.parameters import count_parameters
from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import Batch, TrainConfig
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import FAMILIES, read_config
from recount_models import read_catalog

ROWS = read_catalog()
# Of all models; encoders of text, pictures and sound are most of them.
MOST_WITHOUT_FAMILY = 0.17
# Rows whose family has no rules for one field of theirs.
LEFT_TO_A_TRACE = {
    "embeddinggemma-300m": "use_bidirectional_attention",
    "gte-reranker-modernbert-base": "classifier_pooling",
}
# Billions of parameters on the pages of models whose classes come with the weights; a layer too
# many or too few is more than the rounding.
PUBLISHED = {
    "exaone-3.5-7.8b": 7.8,
    "llama-3.3-nemotron-super-49b": 49,
    "llama-3.1-nemotron-ultra-253b": 253,
    "ling-mini-2.0": 16,
    "ling-flash-2.0": 100,
    "ling-1t": 1000,
}
ROUNDED = 0.03


def parameters(config: dict[str, Any]) -> int:
    """Parameters of the model that a config describes, tied ones once."""
    images = Batch(images=int(config["model_type"] == "blip-2"))  # whose forward takes one
    train = TrainConfig(micro_batch_size=1, sequence_length=64, batch=images)
    policy = Policy(train, STACKS["hf"])
    return count_parameters(build_step(read_config(config), policy))[0]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_parameters_are_those_of_the_catalog(row: dict[str, Any]) -> None:
    if row["config"]["model_type"] not in FAMILIES:
        pytest.skip(f"no family reads {row['config']['model_type']} yet")
    if row["name"] in LEFT_TO_A_TRACE:
        with pytest.raises(InputError, match=LEFT_TO_A_TRACE[row["name"]]):
            parameters(row["config"])
        return
    assert parameters(row["config"]) == row["parameters"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_repositories_own_classes_are_those_published(name: str) -> None:
    row = next(row for row in ROWS if row["name"] == name)
    assert parameters(row["config"]) == row["parameters"]
    assert row["parameters"] / 1e9 == pytest.approx(PUBLISHED[name], rel=ROUNDED)


def test_layers_that_a_search_replaced_or_varied_otherwise_are_refused() -> None:
    row = next(row for row in ROWS if row["name"] == "llama-3.3-nemotron-super-49b")
    first, *others = row["config"]["block_configs"]
    for change, quoted in (
        ({"ffn": {"replace_with_linear": True}}, "replaced by one linear"),
        ({"attention": {"n_heads_in_group": 4}}, "n_heads_in_group"),
    ):
        with pytest.raises(InputError, match=quoted):
            parameters({**row["config"], "block_configs": [{**first, **change}, *others]})


def test_a_layer_of_a_search_may_lack_attention_or_feed_forward_or_both() -> None:
    row = next(row for row in ROWS if row["name"] == "llama-3.3-nemotron-super-49b")
    first, *others = row["config"]["block_configs"]
    hidden, whole = row["config"]["hidden_size"], row["parameters"]
    attention, width = 2 * hidden * hidden * (1 + 1 / 8), 14336  # 2.625 * 2 * 8192 / 3, to 256

    def without(*names: str) -> int:
        block = {**first, **{name: {"no_op": True} for name in names}}
        return whole - parameters({**row["config"], "block_configs": [block, *others]})

    assert without("attention") == attention + hidden
    assert without("ffn") == 3 * hidden * width + hidden
    assert without("attention", "ffn") == without("attention") + without("ffn")


def test_what_no_family_reads_is_left_to_a_trace_of_the_real_class() -> None:
    unread = [row for row in ROWS if row["config"]["model_type"] not in FAMILIES]
    assert len(unread) <= MOST_WITHOUT_FAMILY * len(ROWS)
    assert all(row["class"] for row in unread)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 1000,
    "num_hidden_layers": 4,
}

BROKEN = [
    ({"num_attention_heads": 7}, "num_key_value_heads"),
    ({"num_attention_heads": 12, "num_key_value_heads": 12}, "hidden_size"),
    ({"hidden_act": "swiglu"}, "hidden_act='swiglu'"),
    ({"attention_dropout": 1.5}, "attention_dropout=1.5"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    (
        {
            "model_type": "olmo3",
            "layer_types": ["full_attention", "sliding", "full_attention", "full_attention"],
        },
        "'sliding'",
    ),
    ({"model_type": "phi", "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
    (
        {
            "model_type": "gpt_neo",
            "num_heads": 8,
            "num_layers": 4,
            "attention_types": [[["global"], 3]],
        },
        "attention_types",
    ),
    (
        {"model_type": "gptj", "n_head": 8, "n_layer": 2, "n_embd": 256, "rotary_dim": 64},
        "rotary_dim=64",
    ),
    (
        {
            "model_type": "codegen",
            "n_head": 6,
            "n_embd": 192,
            "n_layer": 2,
            "num_attention_heads": None,
            "hidden_size": None,
        },
        "num_attention_heads=6",
    ),
    (
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 3},
        "num_kv_heads=3",
    ),
]


@pytest.mark.parametrize(("changes", "quoted"), BROKEN, ids=[quoted for _, quoted in BROKEN])
def test_a_field_that_changes_shapes_is_refused_in_one_line(
    changes: dict[str, Any], quoted: str
) -> None:
    with pytest.raises(InputError) as caught:
        parameters({**LLAMA, **changes})
    assert quoted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("expand", [-2, 0, 1e-3])
def test_a_mixer_without_width_is_refused(expand: float) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "expand": expand}
    with pytest.raises(InputError, match=f"expand={expand} leaves a width"):
        read_config({"model_type": "mamba", **config})


def test_a_task_that_an_own_class_lacks_is_refused() -> None:
    """Classes that come with the weights have one head; another was priced as that one."""
    row = next(row for row in ROWS if row["name"] == "internlm2-1.8b")
    assert read_config(row["config"], task="causal-lm").task == "causal-lm"
    with pytest.raises(InputError, match="leave it out"):
        read_config(row["config"], task="sequence-classification")
