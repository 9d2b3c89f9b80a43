"""Keys of images in trainers' files: read as the trainer scales images, and never silenced by a flag
that does not say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from napkinmath.answers.assumptions import assumptions
from napkinmath.answers.figures import Verdict
from napkinmath.answers.images import images_of
from napkinmath.config.job_keys import KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

LLAMA_FACTORY = (
    "model_name_or_path: qwen2-vl-2b\nstage: sft\nfinetuning_type: lora\nlora_target: all\n"
    "cutoff_len: 4096\nper_device_train_batch_size: 8\nbf16: true\n"
)
SWIFT = "swift sft --model Qwen/Qwen2-VL-2B-Instruct --tuner_type lora --max_length 4096"
AXOLOTL = (
    "base_model: qwen2-vl-2b\nadapter: lora\nlora_target_linear: true\nsequence_len: 4096\n"
    "lora_mlp_kernel: false\n"
)
AUTOMODEL = (
    "recipe: FinetuneRecipeForVLM\nstep_scheduler: {local_batch_size: 1}\npeft: {dim: 8}\n"
    "distributed: {dp_size: 1}\n"
    "model: {pretrained_model_name_or_path: Qwen/Qwen2-VL-2B-Instruct}\n"
)


def priced_of(tmp_path: Path, text: str, **flags: object) -> Any:
    job = tmp_path / ("job.sh" if "swift sft" in text else "job.yaml")
    job.write_text(text, encoding="utf-8")
    notes: list[str] = []
    return priced(with_job_file({"gpu": "H100", **flags, "job": str(job)}, notes), notes)[0]


def unpriced(e: Any) -> list[str]:
    return [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)]


def tokens_of(e: Any) -> int:
    """Of one image of Qwen2-VL."""
    images = images_of(e)
    assert images is not None
    return images.picture.tokens


@pytest.mark.parametrize(
    ("limit", "image", "tokens"),
    [
        ("image_max_pixels: 131072", "1600x1200", 15 * 11),  # 418x313 of 28x28
        ("", "1024x768", 32 * 24),  # 886x665, of 768 x 768 pixels; the processor's limit floors
        ("", "700x700", 25 * 25),  # below it
    ],
)
def test_llama_factory_scales_down_before_the_processor_rounds(
    limit: str, image: str, tokens: int, tmp_path: Path
) -> None:
    """data/mm_plugin.py _preprocess_image, then smart_resize."""
    e = priced_of(tmp_path, LLAMA_FACTORY + limit, image=image)
    assert (tokens_of(e), unpriced(e), e.verdict) == (tokens, [], Verdict.FITS)


@pytest.mark.parametrize("images", [{"images": 1}, {}])
def test_a_limit_without_a_size_stays_named(images: dict[str, object], tmp_path: Path) -> None:
    e = priced_of(tmp_path, LLAMA_FACTORY + "image_max_pixels: 131072\n", **images)
    assert unpriced(e) == ["image_max_pixels"]
    assert (e.priced_verdict, e.verdict) == (Verdict.FITS, Verdict.UNKNOWN)


def test_a_batch_of_text_has_no_limit(tmp_path: Path) -> None:
    e = priced_of(tmp_path, LLAMA_FACTORY + "image_max_pixels: 131072\n", images=0)
    assert (unpriced(e), e.verdict) == ([], Verdict.FITS)


def test_how_images_are_cut_and_small_ones_stay_named(tmp_path: Path) -> None:
    text = LLAMA_FACTORY + "image_min_pixels: 262144\nimage_do_pan_and_scan: true\n"
    e = priced_of(tmp_path, text, image="256x256")
    assert sorted(unpriced(e)) == ["image_do_pan_and_scan", "image_min_pixels"]
    assert unpriced(priced_of(tmp_path, text, image="1024x768")) == ["image_do_pan_and_scan"]


def test_swift_has_a_limit_of_its_own_and_the_processors_in_the_shell(tmp_path: Path) -> None:
    text = f"export MAX_PIXELS=3000000\nMAX_PIXELS=200704 {SWIFT} --max_pixels 1003520\n"
    e = priced_of(tmp_path, text, image="1600x1200")
    batch = e.config.batch
    assert (batch.image_limit, batch.max_pixels) == (1_003_520, 200_704)
    assert (tokens_of(e), unpriced(e)) == (18 * 13, [])  # 1156x867 within 200,704 pixels
    assert unpriced(priced_of(tmp_path, text)) == ["max_pixels", "MAX_PIXELS"]


def test_the_shells_words_to_the_allocator_are_read(tmp_path: Path) -> None:
    e = priced_of(tmp_path, f"export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'\n{SWIFT}\n")
    assert "segments that grow" in " ".join(assumptions(e))


def test_axolotl_scales_every_image(tmp_path: Path) -> None:
    text = AXOLOTL + "image_size: 448\n"
    assert unpriced(priced_of(tmp_path, text)) == ["image_size"]
    e = priced_of(tmp_path, text, images=2)
    assert (e.config.batch.image_size, tokens_of(e), unpriced(e)) == ((448, 448), 16 * 16, [])
    wide = priced_of(tmp_path, AXOLOTL + "image_size: [560, 280]\n", images=1)
    assert tokens_of(wide) == 20 * 10


def test_automodels_processor_and_mock_images(tmp_path: Path) -> None:
    limits = AUTOMODEL + "processor: {min_pixels: 200704, max_pixels: 1003520}\n"
    assert unpriced(priced_of(tmp_path, limits)) == ["processor.min_pixels", "processor.max_pixels"]
    e = priced_of(tmp_path, limits, image="100x100")
    assert (tokens_of(e), unpriced(e)) == (16 * 16, [])
    target = "nemo_automodel.components.datasets.vlm.mock.build_mock_vlm_dataset"
    mock = f"dataset: {{_target_: {target}, num_images_per_sample: 2, image_size: [280, 560]}}\n"
    e = priced_of(tmp_path, AUTOMODEL + mock)
    assert (e.config.batch.images, tokens_of(e), unpriced(e)) == (2, 10 * 20, [])
