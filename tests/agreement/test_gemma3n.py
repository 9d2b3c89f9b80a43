"""Gemma 3n with its towers: the weights' count, and a step on text against the traced one.

timm builds the tower of images, and is no part of the tests' environment: in its place stands a
module with the weights that the rules count.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath.catalog.models import find_row
from napkinmath.ir.model_spec import Stage
from napkinmath.models.families.config import Config
from napkinmath.models.families.gemma3n_towers import VISION, vision_tower
from napkinmath.models.layers.idle import IdleModule
from recount_models import build_on_meta

JOINT: dict[str, Any] = {
    "model_type": "gemma3n",
    "architectures": ["Gemma3nForConditionalGeneration"],
    "text_config": TINY["gemma3n_text"],
    "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 48},
    "audio_config": {
        "model_type": "gemma3n_audio",
        "hidden_size": 64,
        "input_feat_size": 32,
        "sscp_conv_channel_size": [16, 8],
        "conf_num_hidden_layers": 2,
        "conf_num_attention_heads": 4,
    },
}
TOLERANCE = 0.0001  # less than a hidden state: the idle tower of images is most of these peaks


def _modules(stages: list[Stage]) -> list[IdleModule]:
    parts = [(stage.part, stage.count) for stage in stages]
    return [part for part, count in parts for _ in range(count) if isinstance(part, IdleModule)]


def _stub_tower() -> Any:
    """A module with the tower's weights under their own names."""
    tower = torch.nn.Module()
    stages = vision_tower(Config({}, "tower"))
    for stage in stages:
        path = stage.path.removeprefix(f"{VISION}.").removeprefix(VISION).replace(".", "_")
        for copy, module in enumerate(_modules([stage])):
            for weight in module.weights:
                name = f"{path}_{stages.index(stage)}_{copy}_{weight.name.replace('.', '_')}"
                tower.register_parameter(name, torch.nn.Parameter(torch.empty(weight.axes)))
    return tower


@pytest.fixture
def stub_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma3n import modeling_gemma3n

    built = modeling_gemma3n.AutoModel.from_config

    def build(config: Any, **options: Any) -> Any:
        if config.model_type == "gemma3n_vision":
            return _stub_tower()
        return built(config, **options)

    monkeypatch.setattr(modeling_gemma3n.AutoModel, "from_config", staticmethod(build))


def test_the_tower_of_images_has_timms_parameters() -> None:
    weights = [one for part in _modules(vision_tower(Config({}, "tower"))) for one in part.weights]
    counted = sum(torch.Size(one.axes).numel() for one in weights)
    assert counted == 294_126_912  # timm 1.0.31 create_model("mobilenetv5_300m_enc")
    assert len(weights) == 548


@pytest.mark.parametrize("name", ["gemma-3n-e2b", "gemma-3n-e4b"])
def test_parameters_are_those_of_the_class_with_that_tower(stub_tower: None, name: str) -> None:
    row = find_row(name)
    assert row is not None
    model = build_on_meta(dict(row))
    assert sum(parameter.numel() for parameter in model.parameters()) == row["parameters"]


@pytest.mark.parametrize(("method", "checkpointing"), [("full", False), ("lora", True)])
def test_a_step_on_text_is_that_of_the_trace(
    stub_tower: None, method: str, checkpointing: bool
) -> None:
    case = Case(config=JOINT, method=method, checkpointing=checkpointing, attention="auto")
    error = compare("gemma3n", case).difference
    assert abs(error) <= TOLERANCE
