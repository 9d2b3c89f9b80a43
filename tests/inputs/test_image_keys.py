"""Keys of images in trainers' files: none is silenced by a flag that does not say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from napkinmath.answers.figures import Verdict
from napkinmath.config.job_keys import KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

LLAMA_FACTORY = (
    "model_name_or_path: qwen2-vl-2b\nstage: sft\nfinetuning_type: lora\nlora_target: all\n"
    "cutoff_len: 4096\nper_device_train_batch_size: 8\nbf16: true\n"
)


def priced_of(tmp_path: Path, text: str, **flags: object) -> Any:
    job = tmp_path / "job.yaml"
    job.write_text(text, encoding="utf-8")
    notes: list[str] = []
    return priced(with_job_file({**flags, "job": str(job)}, notes), notes)[0]


@pytest.mark.parametrize("images", [{"image": "1600x1200"}, {"images": 1}, {}])
def test_the_size_of_videos_stays_named(images: dict[str, object], tmp_path: Path) -> None:
    e = priced_of(tmp_path, LLAMA_FACTORY + "video_max_pixels: 16384\n", gpu="H100", **images)
    assert [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)] == ["video_max_pixels"]
    assert (e.priced_verdict, e.verdict) == (Verdict.FITS, Verdict.UNKNOWN)
