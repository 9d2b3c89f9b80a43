"""BART's kin against the traced step: other positions, norms before each sublayer, heads without a
bias."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from agreement.mixed_configs import MIXED
from agreement_matrix import compare
from analytic_vs_traced import Case

CLASSES = {
    "mbart": "MBartForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "marian": "MarianMTModel",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
}
ALL_LAYERS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "encoder_layers": 2}
TOLERANCE = 0.001  # less than a hidden state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "checkpointing", "attention"), [("full", False, "auto"), ("lora", True, "eager")]
)
@pytest.mark.parametrize("kind", CLASSES)
def test_the_peak_is_that_of_the_traced_step(
    kind: str, method: str, checkpointing: bool, attention: str
) -> None:
    own = {"model_type": kind, "architectures": [CLASSES[kind]]}
    case = Case(
        config={**MIXED["bart"], **ALL_LAYERS, **own},
        method=method,
        checkpointing=checkpointing,
        attention=attention,
        optimizer="adamw-fused",
    )
    cell = compare(kind, case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.difference:+.3%}"
