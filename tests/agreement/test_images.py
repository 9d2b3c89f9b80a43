"""A step with images by the rules against the same step of the real class on meta tensors."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from agreement.image_configs import IMAGES
from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case, traced_phase_peaks
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import AdapterConfig, Attention, Batch, Precision
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import trace_module

# Two images in each of two sequences, of a size that every processor scales.
MEDIA = Batch(images=2, image_size=(320, 224))
READ = (
    "llava",
    "gemma3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "mllama",
    "gemma4_unified",
    *IMAGES,
)
SMALL = MEDIA.replace(image_size=(112, 84))  # for towers of 64 pixels
# Of other sizes and lengths: (images, tokens of a sequence).
OTHER = {
    "gemma4": (Batch(images=1, image_size=(300, 300)), 288),
    "gemma4_unified": (Batch(images=1, image_size=(320, 224)), 320),
    "internvl": (SMALL.replace(images=1), 256),
    "internvl of experts": (SMALL.replace(images=1), 256),
    "qianfan_ocr": (SMALL.replace(images=1), 256),
    "video_llama_3": (SMALL, 512),
    "video_llava": (SMALL.replace(images=1), 256),
    "llava_next_video": (SMALL.replace(images=1), 288),
    "paddleocr_vl": (SMALL.replace(images=1), 256),
    "lighton_ocr": (Batch(images=1, image_size=(120, 88)), 200),  # 15 x 11 patches of 8 pixels
    "llava_next": (SMALL.replace(images=1), 288),
    "aya_vision": (SMALL.replace(images=1), 512),
    "cohere2_vision": (SMALL.replace(images=1), 512),
    # of a canvas that is scaled down; several images are one tile each
    "llava_onevision": (Batch(images=1, image_size=(240, 200)), 512),
}
CELLS = (("full", False), ("lora", True))
CLOSE = 0.002  # as in test_analytic_against_traced.py
# PEFT's all-linear on a router that returns a tuple; on mergers whose linears are called "0" and
# "2", as are the layers of another tower; on a tower whose linears have the names of experts, which
# PEFT has moved to their parameters.
REFUSED = {("llama4", "lora"), ("qwen3_omni_moe_thinker", "lora"), ("glm4v_moe", "lora")}
FROZEN_CLOSE = 0.003  # tables of integers: 19 kB of the 8 MB that the smallest holds
FROZEN = (
    "glm4v",
    "glm4v_moe",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "llava_onevision",
    "paddleocr_vl",
    "deepseek_vl",
    "kimi_k25",
    "lighton_ocr",
    "glm_ocr",
    "smolvlm",
    "video_llama_3",
)
# Kept by a frame of the library while the tower runs.
KNOWN = {("mllama", "lora"): 0.003}
SEQUENCES, LENGTH = 2, 128
TOLERANCE = {"sdpa": 0.005, "eager": 0.016}  # scores of a mask with one image more or less alive


def image_batch(config: dict[str, Any]) -> dict[str, Any]:
    """One image of four tiles in each sequence."""
    vision = config["vision_config"]
    size, long = vision["image_size"], {"dtype": torch.long, "device": "meta"}
    return {
        "input_ids": torch.zeros(SEQUENCES, LENGTH, **long),
        "labels": torch.zeros(SEQUENCES, LENGTH, **long),
        "pixel_values": torch.zeros(
            SEQUENCES, 1, 4, 3, size, size, dtype=torch.float32, device="meta"
        ),
        "aspect_ratio_ids": torch.zeros(SEQUENCES, 1, **long),
        "aspect_ratio_mask": torch.zeros(SEQUENCES, 1, 4, **long),
        "cross_attention_mask": torch.zeros(SEQUENCES, LENGTH, 1, 4, **long),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "checkpointing"), CELLS)
@pytest.mark.parametrize("family", READ)
def test_the_peak_with_images_is_that_of_the_traced_step(
    family: str, method: str, checkpointing: bool
) -> None:
    if (family, method) in REFUSED:
        pytest.skip("the libraries refuse this method for this family")
    config = (TINY | IMAGES)[family]
    media, length = OTHER.get(family, (SMALL if family in IMAGES else MEDIA, 256))
    case = Case(
        config=config,
        method=method,
        checkpointing=checkpointing,
        attention="auto",
        sequence=length,
        optimizer="adamw-fused",
        media=media,
    )
    cell = compare(family, case)
    assert abs(cell.difference) <= KNOWN.get((family, method), CLOSE), f"{cell.difference:+.3%}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FROZEN)
def test_a_tower_without_adapters_keeps_nothing(family: str, *, checkpointing: bool) -> None:
    """LoRA of the text alone, as trainers that freeze the tower have it: of checkpoints
    without a gradient, each step held a tower's more."""
    media, length = OTHER.get(family, (SMALL, 256))
    case = Case(
        config=(TINY | IMAGES)[family],
        method="lora",
        checkpointing=checkpointing,
        targets=("o_proj",),  # of no tower here
        attention="auto",
        sequence=length,
        optimizer="adamw-fused",
        media=media,
    )
    assert abs(compare(family, case).difference) <= FROZEN_CLOSE


@pytest.mark.filterwarnings("ignore")
def test_pixels_of_a_processor_are_fp32_under_autocast() -> None:
    """The trace gave a class that casts nothing the weights' type, where a processor's fp32 is cast
    once more: 15% of these peaks."""
    case = Case(
        config=IMAGES["kimi_k25"],
        checkpointing=True,
        attention="auto",
        sequence=600,
        optimizer="adamw-fused",
        precision="bf16-autocast",
        media=MEDIA,
    )
    assert abs(compare("kimi_k25", case).difference) <= CLOSE


@pytest.mark.filterwarnings("ignore")
def test_the_last_linear_of_torchs_attention_is_not_packed() -> None:
    """A subclass of nn.Linear in SigLIP's pooling, which bitsandbytes leaves whole."""
    config = dict((TINY | IMAGES)["lfm2_vl"])
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    case = Case(
        config={**config, "vision_config": {**vision, "vision_use_head": True}},
        method="qlora",
        attention="auto",
        sequence=900,  # as many as unpack the weights
        optimizer="adamw-fused",
    )
    cell = compare("lfm2_vl", case)
    ours, theirs = cell.roles["quantization constants"]
    assert ours == theirs and abs(cell.difference) <= CLOSE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["blip-2", "blip-2 over t5"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_quantizers_leave_the_q_former_whole(family: str, *, checkpointing: bool) -> None:
    """Its linears were packed, and embeddings made to need a gradient as where token ids are a
    model's main input: -5.5 and +1.6%."""
    case = Case(
        config=IMAGES[family],
        method="qlora",
        checkpointing=checkpointing,
        attention="auto",
        sequence=128,
        optimizer="adamw-fused",
        media=SMALL,
    )
    assert abs(compare(family, case).difference) <= CLOSE


def test_a_gradient_goes_on_through_a_block_that_trains_nothing() -> None:
    """LoRA leaves the queries alone, whose block hands the tower's states on in another type: the
    tower's norm lost its gradient, and the allocator's replay ended in an error."""
    found = estimate(
        IMAGES["blip-2"],
        micro_batch_size=2,
        sequence_length=128,
        adapter=AdapterConfig(targets=("all-linear",)),
        batch=SMALL,
    )
    norm = [s for s in found.timeline.segments if s.name == "vision_model, 2"]
    assert {s.phase for s in norm} >= {Phase.FORWARD, Phase.BACKWARD}
    assert found.memory.reserved.high > 0


def test_cosmos_3_is_qwen_3_vl() -> None:
    config = TINY["qwen3_vl"]
    renamed = read_config({**config, "model_type": "cosmos3_omni"})
    assert renamed.stages == read_config(config).stages


def test_a_blip_2_without_images_is_refused() -> None:
    with pytest.raises(InputError, match="--images 1"):
        assert estimate(IMAGES["blip-2"], micro_batch_size=2, sequence_length=128).phase_peaks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("images", "close"), [(1, CLOSE), (2, 0.02)])
def test_eager_attention_goes_image_by_image(images: int, close: float) -> None:
    """All scores are kept for the backward, the softmax's own copies are of one image at a time:
    priced at once they were 9 to 15% of the peak."""
    media = MEDIA.replace(images=images)
    case = Case(
        config=TINY["qwen2_vl"],
        method="lora",
        checkpointing=True,
        attention="eager",
        sequence=256,
        optimizer="adamw-fused",
        media=media,
    )
    cell = compare("qwen2_vl", case)
    assert abs(cell.difference) <= close, f"{cell.difference:+.3%}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_3_2_vision_with_an_image(attention: str) -> None:
    config: dict[str, Any] = dict(TINY["mllama"])
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.for_model(**config),
            dtype=torch.bfloat16,
            attn_implementation=attention,
        )
    model.train()
    batch = image_batch(config)

    def step() -> None:
        model(**batch).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    traced = traced_phase_peaks(trace_module(model, step, inputs=batch))
    by_rules = estimate(
        config,
        micro_batch_size=SEQUENCES,
        sequence_length=LENGTH,
        precision=Precision.BF16,
        attention=Attention(attention),
        stack="hf-bare",
        optimizer="sgd",
        clip_gradients=False,
        batch=Batch(images=1),
    )
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert by_rules.phase_peaks[phase].nbytes == pytest.approx(
            traced[phase], rel=TOLERANCE[attention]
        )
