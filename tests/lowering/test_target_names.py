"""Which modules an adapter's names mean, by PEFT's rules and by what libraries called them before."""

from __future__ import annotations

import pytest
from cli.runs import run
from napkinmath.lowering.target_names import is_named


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("model.layers.*.self_attn.q_proj", "q_proj", True),
        ("model.layers.*.self_attn.q_proj", "proj", False),
        # A wrapper's pattern in a model that is priced on text.
        (
            "model.layers.*.self_attn.o_proj",
            r"model.language_model.layers.\d+.self_attn.o_proj",
            True,
        ),
        ("model.layers.*.mlp.up_proj", r"model.language_model.layers.\d+.self_attn.o_proj", False),
        ("model.vision_tower.layers.*.q_proj", r"model.language_model.*q_proj", False),
        # transformers 4's words for encoders of images, which text models never had.
        ("vit.layers.*.attention.q_proj", "query", True),
        ("vit.layers.*.attention.o_proj", "query", False),
        ("model.layers.*.self_attn.q_proj", "query", False),
        ("bert.encoder.layer.*.attention.self.query", "query", True),
        # Megatron-core's words, with and without its patterns.
        ("model.layers.*.self_attn.k_proj", "linear_qkv", True),
        ("model.layers.*.self_attn.o_proj", "linear_qkv", False),
        ("model.layers.*.mlp.up_proj", "*.linear_fc1", True),
        ("transformer.h.*.mlp.c_proj", "linear_proj", False),
        ("transformer.h.*.mlp.c_proj", "linear_fc2", True),
    ],
)
def test_what_a_name_means(path: str, name: str, found: bool) -> None:
    assert is_named(path, name) is found


def test_targets_of_nothing_are_refused_beside_modules_that_are_trained() -> None:
    done = run(
        *("--model", "llama-3.2-1b", "--lora", "--targets", "query"),
        *("--train-modules", "lm_head", "--ctx", "64"),
    )
    assert done.code == 2
    assert "matches no module" in done.err


@pytest.mark.parametrize("model", ["pythia-160m", "gpt2", "deberta-v3-small", "resnet-50"])
def test_the_names_that_a_refusal_offers_are_of_the_model(model: str) -> None:
    """GPT-NeoX was told to use q_proj,v_proj, which it had just been refused for."""
    words = ("--model", model, "--lora", "--targets")
    done = run(*words, "nothing_of_it")
    assert done.code == 2
    offered = done.err.rpartition("such as ")[2].strip() if "such as" in done.err else "all-linear"
    assert run(*words, offered).code == 0
