"""Classifiers of images: the step of their learned forms against that of the real class, and what
options mean for them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import Batch
from napkinmath.estimate import estimate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import trace_config

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 112,
    "patch_size": 16,
}
TYPES: dict[str, dict[str, Any]] = {
    "deit": {**SIZES, "architectures": ["DeiTForImageClassification"]},
    "dinov2_with_registers": {
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        "mlp_ratio": 4,
        "num_register_tokens": 3,
        "architectures": ["Dinov2WithRegistersForImageClassification"],
    },
    "clip": {
        "vision_config": {**SIZES, "image_size": 224, "patch_size": 32},
        "architectures": ["CLIPForImageClassification"],
    },
}
CLOSE = 0.001  # as for learned forms of text
DEIT: dict[str, Any] = {"model_type": "deit", **TYPES["deit"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "checkpointing"), [("full", False), ("lora", True)])
@pytest.mark.parametrize("model_type", TYPES)
def test_the_peak_is_that_of_the_traced_step(
    model_type: str, method: str, checkpointing: bool
) -> None:
    config = {"model_type": model_type, **TYPES[model_type]}
    case = Case(
        config=config,
        method=method,
        checkpointing=checkpointing,
        batch=3,
        optimizer="adamw-fused",
    )
    assert abs(compare(model_type, case).difference) <= CLOSE


@pytest.mark.filterwarnings("ignore")
def test_both_carry_the_size_of_image_that_is_asked_for() -> None:
    """A classifier is built for it: 14 x 14 patches of the table in the place of 7 x 7."""
    media = Batch(images=1, image_size=(224, 224))
    traced = trace_config(DEIT, micro_batch_size=2, media=media, optimizer="sgd")
    found = estimate(
        DEIT, micro_batch_size=2, image="224x224", optimizer="sgd", clip_gradients=False,
        precision="bf16", stack="hf-bare",
    )  # fmt: skip
    assert dict(found.spec.symbols)["n"] == 14 * 14 + 2
    peak = max(point.nbytes for point in found.phase_peaks.values())
    assert peak == pytest.approx(traced.peak_bytes, rel=CLOSE)


def test_a_length_is_noted_and_several_images_are_refused() -> None:
    with pytest.warns(UserWarning, match="--ctx 512 has no effect"):
        estimate(DEIT, ctx=512)
    with pytest.raises(InputError, match="one image at a time"):
        estimate(DEIT, images=2)
    with pytest.raises(InputError, match="square images; use 224x224"):
        estimate(DEIT, image="224x112")


def test_another_head_than_that_of_images_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match="--task image-classification"):
        read_config({**DEIT, "architectures": ["DeiTModel"]})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["resnet", "siglip2"])
def test_models_without_an_image_size_are_traced(model_type: str) -> None:
    """Square images of 224 pixels, and as many patches as there are positions."""
    small = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 128, 256]}
    config = small if model_type == "resnet" else {"vision_config": {"num_hidden_layers": 1}}
    name = {"resnet": "ResNet", "siglip2": "Siglip2"}[model_type]
    whole = {"model_type": model_type, "architectures": [f"{name}ForImageClassification"], **config}
    assert trace_config(whole, micro_batch_size=2).peak_bytes > 1 << 20
