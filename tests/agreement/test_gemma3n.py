"""Gemma 3n with its towers: the weights' count, and steps on text and with an image against the
traced ones.

timm builds the tower of images, and is no part of the tests' environment. For text a module with
the weights that the rules count stands in its place. With an image, the traced peaks are those that
`python benchmarks/accuracy/analytic_vs_traced.py` gave beside timm 1.0.31; where timm is there, the
trace is run.
"""

from __future__ import annotations

import importlib.util
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
from analytic_vs_traced import Case, phase_peaks, traced_phase_peaks
from napkinmath.catalog.models import find_row
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import Batch, TrainConfig
from napkinmath.ir.ledger import Weight
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.record import record_runs
from napkinmath.models.families import read_config
from napkinmath.models.families.gemma3n_towers import VISION
from recount_models import build_on_meta

JOINT: dict[str, Any] = {
    "model_type": "gemma3n",
    "architectures": ["Gemma3nForConditionalGeneration"],
    "text_config": TINY["gemma3n_text"],
    "vision_config": {
        "model_type": "gemma3n_vision",
        "hidden_size": 2048,
        "vocab_size": 128,
        "vocab_offset": 256,
    },
    "audio_config": {
        "model_type": "gemma3n_audio",
        "hidden_size": 64,
        "input_feat_size": 32,
        "sscp_conv_channel_size": [16, 8],
        "conf_num_hidden_layers": 2,
        "conf_num_attention_heads": 4,
    },
}
IMAGE = Batch(images=1, image_size=(640, 480))
PEAKS = {
    ("full", False): 12_223_678_976,
    ("full", True): 12_209_814_528,
    ("lora", False): 1_000_198_144,
    ("lora", True): 1_000_351_744,
}
"""Traced peaks of two sequences of 300 tokens with an image each, by method and checkpointing."""
TOLERANCE = 0.0001  # less than a hidden state: the idle tower of images is most of these peaks


def _weights(config: dict[str, Any]) -> list[Weight]:
    """The weights of the tower of images, each copy for itself."""
    policy = Policy(TrainConfig(micro_batch_size=1, sequence_length=16), STACKS["hf-bare"])
    runs = record_runs(read_config(config), policy).runs
    return [
        weight
        for run in runs
        for weight in [*run.block.weights] * run.count
        if weight.path.startswith(VISION)
    ]


def _stub_tower() -> Any:
    """A module with as many weights as the tower has, of its sizes."""
    tower = torch.nn.Module()
    for number, weight in enumerate(_weights(JOINT)):
        shape = [int(axis) for axis in weight.axes]  # type: ignore[call-overload]
        tower.register_parameter(f"w{number}", torch.nn.Parameter(torch.empty(shape)))
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
    weights = _weights(JOINT)
    counted = sum(torch.Size(one.axes).numel() for one in weights)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("method", "checkpointing"), PEAKS)
def test_a_step_with_images_is_that_of_the_trace(method: str, checkpointing: bool) -> None:
    case = Case(
        config=JOINT,
        method=method,
        checkpointing=checkpointing,
        attention="auto",
        sequence=300,
        optimizer="adamw-fused",
        media=IMAGE,
    )
    ours = max(phase_peaks(case.analytic()).values())
    assert abs(ours / PEAKS[method, checkpointing] - 1) <= TOLERANCE
    if importlib.util.find_spec("timm") is not None:
        traced = max(traced_phase_peaks(case.traced()).values())
        assert traced == PEAKS[method, checkpointing]
