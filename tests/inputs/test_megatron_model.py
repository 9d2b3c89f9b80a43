"""Megatron-LM's arguments as the decoder that Megatron-Core builds from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.base.errors import InputError
from napkinmath.inputs.job_file import read_job
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.megatron_model import listed_pattern

H, L, A, F, V = 64, 4, 4, 256, 512
BASE = {
    **{"num-layers": L, "hidden-size": H, "num-attention-heads": A, "seq-length": 32},
    **{"max-position-embeddings": 32, "vocab-size": V, "micro-batch-size": 1, "bf16": True},
    **{"ffn-hidden-size": F, "make-vocab-size-divisible-by": 1},
}
ROPE = {"position-embedding-type": "rope", "disable-bias-linear": True}
GROUPED = {"group-query-attention": True, "num-query-groups": 2}
EXPERTS = {"num-experts": 4, "moe-ffn-hidden-size": 32, "disable-bias-linear": True}
TABLES = V * H + 32 * H
LAYER_NORMS = 2 * 2 * H
PLAIN = 2 * H * F
FULL = 4 * H * H

# Arguments beside BASE -> parameters, counted by hand.
COUNTED: dict[str, tuple[dict[str, object], int]] = {
    "biases, LayerNorm, learned positions": (
        {},
        TABLES + L * (FULL + 4 * H + PLAIN + F + H + LAYER_NORMS) + 2 * H,
    ),
    "grouped heads of another width": (
        {**ROPE, **GROUPED, "kv-channels": 32},
        V * H + L * (2 * H * 32 * A + 2 * H * 32 * 2 + PLAIN + LAYER_NORMS) + 2 * H,
    ),
    "SwiGLU with biases": (
        {"swiglu": True, "normalization": "RMSNorm", "untie-embeddings-and-output-weights": True},
        TABLES + V * H + L * (FULL + 4 * H + 3 * H * F + 2 * F + H + 2 * H) + H,
    ),
    "biases of queries, keys and values, and their norms": (
        {**ROPE, "add-qkv-bias": True, "qk-layernorm": True},
        V * H + L * (FULL + 3 * H + 4 * (H // A) + PLAIN + LAYER_NORMS) + 2 * H,
    ),
    "experts in every other layer, one shared": (
        {**EXPERTS, "moe-layer-freq": "([0]*1+[1]*1)*2", "moe-shared-expert-intermediate-size": 16},
        TABLES
        + L * (FULL + LAYER_NORMS)
        + 2 * PLAIN
        + 2 * (4 * 2 * H * 32 + 4 * H + 2 * H * 16)
        + 2 * H,
    ),
    "latent attention": (
        {
            **{"multi-latent-attention": True, "kv-lora-rank": 16, "qk-head-dim": 8},
            **{"qk-pos-emb-head-dim": 4, "v-head-dim": 8, **ROPE},
        },
        V * H
        + L * (H * A * 12 + H * (16 + 4) + 2 * 16 + 16 * A * 16 + A * 8 * H + PLAIN + LAYER_NORMS)
        + 2 * H,
    ),
    "a mixer a layer": (
        {"hybrid-layer-pattern": "*-|-*", "num-layers": None, "disable-bias-linear": True},
        TABLES + 2 * (FULL + PLAIN) + L * 2 * H + 2 * H,
    ),
}


def _job(folder: Path, given: dict[str, object]) -> str:
    file = folder / "model_config.yaml"
    said = {**BASE, **given}
    lines = [
        f"  --{name}: {'true' if value is True else repr(value)}"
        for name, value in said.items()
        if value is not None
    ]
    file.write_text("MODEL_ARGS:\n" + "\n".join(lines) + "\n")
    return str(file)


@pytest.mark.parametrize("name", COUNTED)
def test_arguments_say_the_decoders_parameters(name: str, tmp_path: Path) -> None:
    given, parameters = COUNTED[name]
    notes: list[str] = []
    found = priced(read_job(_job(tmp_path, given), notes), notes)[0]
    assert found.num_parameters == parameters


def test_a_pattern_is_read_and_never_run() -> None:
    assert listed_pattern("([0]*2+[1]*1)*2", "--moe-layer-freq") == [0, 0, 1, 0, 0, 1]
    assert listed_pattern("2", "--moe-layer-freq") == 2
    for text in ("[1]*99999999", "__import__('os')", "[1]+2", "(" * 999):
        with pytest.raises(InputError, match="moe-layer-freq"):
            listed_pattern(text, "--moe-layer-freq")


def test_letters_without_rules_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'G', for which there are no rules"):
        priced(read_job(_job(tmp_path, {"hybrid-layer-pattern": "G-"}), []), [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokenizer-model": "/data/nemotron_2_256k.model"}, 256_000),
        ({"tokenizer-type": "TikTokenizer", "tokenizer-model": "a.128k.vocab.json"}, 2**17),
        ({"tokenizer-type": "BertWordPieceCase"}, 28_996),
        ({"tokenizer-model": "/data/run10k7/t.model"}, 50_257),
    ],
)
def test_a_tokenizer_says_how_many_words_there_are(
    arguments: dict[str, object], words: int, tmp_path: Path
) -> None:
    def counted(given: dict[str, object]) -> int:
        return priced(read_job(_job(tmp_path, given), []), [])[0].num_parameters

    assert counted({**arguments, "vocab-size": None}) == counted({"vocab-size": words})
