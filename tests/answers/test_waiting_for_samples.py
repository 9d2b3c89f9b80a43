"""A data loader that is slower than the step is a finding, with the workers that would do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from napkinmath import Estimate
from napkinmath.base.errors import InputError
from napkinmath.config.data_loader import DataLoaderConfig
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

JOB = {"model": "tinyllama", "bs": 4, "ctx": 512, "lora": True, "gpu": "A100"}
SAMPLES = 4


def of(**options: object) -> Estimate:
    return priced({**JOB, **options}, [])[0]


def found(**options: object) -> list[str]:
    return [f.text for f in of(**options).findings if "samples" in f.text]


def seconds() -> float:
    time = of().time
    assert time is not None
    return time.seconds


def test_the_training_process_prepares_between_steps_and_workers_beside_them() -> None:
    alone, beside = (
        DataLoaderConfig(samples_per_s=10),
        DataLoaderConfig(samples_per_s=10, workers=2),
    )
    assert alone.waits_s(20, step_s=0.4) == pytest.approx(2.0)
    assert beside.waits_s(20, step_s=0.4) == pytest.approx(0.6)
    assert beside.waits_s(20, step_s=1.0) == 0.0
    assert DataLoaderConfig(workers=2).waits_s(20, step_s=0.4) == 0.0


def test_the_number_that_it_names_keeps_up_and_one_less_does_not() -> None:
    rate = SAMPLES / seconds() / 2.5
    (text,) = found(samples_per_s_per_worker=rate)
    named = re.search(r"--dataloader-workers (\d+)", text)
    assert named is not None and "between steps" in text
    enough = int(named[1])
    assert not found(samples_per_s_per_worker=rate, dataloader_workers=enough)
    (fewer,) = found(samples_per_s_per_worker=rate, dataloader_workers=enough - 1)
    assert f"{enough - 1} workers prepare" in fewer


def test_accumulated_micro_steps_take_more_samples() -> None:
    (text,) = found(samples_per_s_per_worker=1, grad_accum=3)
    assert f"its {3 * SAMPLES} samples" in text


def test_more_workers_than_cores_are_no_way_out() -> None:
    (text,) = found(samples_per_s_per_worker=0.01, gpus=8)
    assert "more than the machine's 64 cores" in text


def test_workers_alone_say_nothing_and_say_so() -> None:
    (text,) = found(dataloader_workers=4)
    assert "says nothing" in text
    assert not found(samples_per_s_per_worker=1e6, dataloader_workers=4)


def test_what_no_loader_can_be_is_refused() -> None:
    with pytest.raises(InputError, match="cannot work"):
        DataLoaderConfig(samples_per_s=-1)
    with pytest.raises(InputError, match="samples-per-s-per-worker"):
        of(samples_per_s_per_worker=0)


def test_a_trainers_file_says_how_many_workers(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: TinyLlama/TinyLlama-1.1B-Chat-v1.0\nper_device_train_batch_size: 4\n"
        "dataloader_num_workers: 3\nmax_length: 512\n"
    )
    flags = {"job": str(path), "gpu": "A100", "samples_per_s_per_worker": 1}
    (told,) = priced(with_job_file(flags, []), [])
    assert any("3 workers prepare" in f.text for f in told.findings)
    flags["dataloader_workers"] = 2
    (flagged,) = priced(with_job_file(flags, []), [])
    assert any("2 workers prepare" in f.text for f in flagged.findings)
