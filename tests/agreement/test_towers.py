"""Joint models on text, whose towers are data that ships: their weights against the class's, and a
step against the traced one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from agreement.image_configs import TEXT, TOWER
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath import estimate
from napkinmath.answers.parameters import count_parameters
from napkinmath.base.errors import InputError
from napkinmath.catalog.learned_forms import read_forms
from napkinmath.catalog.learned_towers import towers_of, types_with_towers
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import TrainConfig
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config
from napkinmath_profiler.tracing.learning.towers import config_model, learn_towers
from napkinmath_profiler.tracing.learning.writing import keep
from towers_agreement import small

LLAVA: dict[str, Any] = {
    "model_type": "vipllava",
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**TOWER, "model_type": "clip_vision_model"},
}
SOUNDS: dict[str, Any] = {
    "d_model": 96,
    "encoder_layers": 3,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 160,
    "num_mel_bins": 16,
    "max_source_positions": 40,
}
JOINT: dict[str, dict[str, Any]] = {
    "vipllava": LLAVA,
    "voxtral": {
        "model_type": "voxtral",
        "text_config": {**TEXT, "model_type": "llama"},
        "audio_config": {**SOUNDS, "model_type": "voxtral_encoder", "encoder_ffn_dim": 384},
    },
    "qwen2_audio": {
        "model_type": "qwen2_audio",
        "text_config": {**TEXT, "model_type": "qwen2"},
        "audio_config": {**SOUNDS, "model_type": "qwen2_audio_encoder"},
        "audio_token_index": 500,
    },
}
CELLS = [
    ("full", False, 2, "auto"),
    ("lora", True, 1, "auto"),
    ("qlora", False, 2, "auto"),
    ("full", True, 1, "eager"),
]
TOLERANCE = 0.001  # a hidden state of these sizes is more


@pytest.mark.parametrize("kind", types_with_towers())
def test_the_parameters_are_those_of_the_class(kind: str) -> None:
    config = small(kind)
    counted = sum(parameter.numel() for parameter in config_model(config).parameters())
    policy = Policy(TrainConfig(micro_batch_size=1, sequence_length=64), STACKS["hf"])
    assert count_parameters(build_step(read_config(config), policy))[0] == counted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "checkpointing", "batch", "attention"), CELLS)
@pytest.mark.parametrize("kind", JOINT)
def test_a_step_on_text_is_that_of_the_trace(
    kind: str, method: str, checkpointing: bool, batch: int, attention: str
) -> None:
    case = Case(
        config=JOINT[kind],
        method=method,
        checkpointing=checkpointing,
        attention=attention,
        batch=batch,
        sequence=896 if method == "qlora" else 333,
        optimizer="adamw-fused",
    )
    cell = compare(kind, case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.difference:+.3%}"


def test_learning_at_other_sizes_gives_the_towers_that_ship(tmp_path: Path) -> None:
    """The expressions are those of the shipped form, a grid of patches among them. Towers have no
    variants, at whose absence the writer of the file raised."""
    (first, *_) = learn_towers(LLAVA)
    (kept,) = read_forms(keep([first], str(tmp_path / "towers.json")))
    assert kept["towers"] == json.loads(json.dumps(first["towers"]))
    shipped = next(one for one in towers_of("vipllava") if one["must"] == first["must"])
    assert first["grids"] and _named(first) == _named(shipped)


def _named(form: Mapping[str, Any]) -> str:
    """The towers with fields in the places of letters."""
    text, grids = json.dumps(form["towers"]), form["grids"]
    fields = {letter: field for field, letter in form["symbols"].items()}
    names = {name: f"grid of {fields[side]} by {fields[p]}" for name, (side, p) in grids.items()}
    return re.sub(r"[xg]\d+", lambda found: (fields | names)[found[0]], text)


def test_a_switch_under_which_the_towers_were_not_seen_is_refused() -> None:
    vision = {**LLAVA["vision_config"], "model_type": "siglip_vision_model"}
    with pytest.raises(InputError, match=r"vision_config.model_type"):
        read_config({**LLAVA, "vision_config": vision})


def test_images_and_sounds_are_named_as_not_priced() -> None:
    for config in JOINT.values():
        assert any("text only" in said for said in estimate(config, ctx=64).assumptions)
    with pytest.raises(InputError, match="tower for which there are no rules"):
        estimate(LLAVA, ctx=64, images=1)
