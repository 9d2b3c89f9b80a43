"""What a newcomer types before reading any help: each ends in one line whose command works."""

from __future__ import annotations

import shlex

import pytest
from napkinmath.cli.main import main

ENDINGS = (0, 1, 3)  # fits, does not, cannot tell: an answer

WORDS = {
    "qwen2.5 7b lora 4090": "qwen2.5-7b --lora --gpu 4090",
    "llama3-8b qlora rtx4090": "llama3-8b --qlora --gpu rtx4090",
    "estimate llama-3.1-8b --qlora": "llama-3.1-8b --qlora",
    "llama-3.1-8b full h100 --bs 2": "llama-3.1-8b --full --gpu h100 --bs 2",
    "phi 4 rtx 4090 lora": "phi-4 --gpu 'rtx 4090' --lora",
    "gemma 2 9b lora on 2xa100": "gemma-2-9b --lora --gpus 2xa100",
    "--model llama-7b qlora": "--qlora --model llama-7b",
    "check llama-7b qlora 4090": "check llama-7b --qlora --gpu 4090",
    "inference llama-3.1-8b --gpu h100": "generate llama-3.1-8b --gpu h100",
    "generate llama-3.1-8b 4090": "generate llama-3.1-8b --gpu 4090",
    "plan generate llama-3.1-8b --gpu h100": "generate llama-3.1-8b --gpu h100 --plan",
    "generate plan llama-3.1-8b 4090": "generate llama-3.1-8b --gpu 4090 --plan",
    "llama-3.1-8b plan 4090": "plan llama-3.1-8b --gpu 4090",
    "llama-3.1-8b qlora 24gb": "llama-3.1-8b --qlora --vram 24gb",
    "llama-3.1-8b lora on rtx4090 24GiB": "llama-3.1-8b --lora --gpu rtx4090",
    "llama-3.1-8b lora a100 80gb": "llama-3.1-8b --lora --gpu 'a100 80gb'",
    "4090": "models --fits 4090",
}


@pytest.mark.parametrize("typed", WORDS)
def test_bare_words_end_in_the_command_that_they_mean(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(typed)) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    meant = complaint.rstrip().rpartition(": estimate ")[2]
    assert meant == WORDS[typed]


# each once, the shortest: that it is taken is what counts
@pytest.mark.parametrize(
    "typed", ["gpt2 lora 4090", "check gpt2 qlora t4", "plan generate gpt2 t4"]
)
def test_that_command_works_when_pasted(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(typed)) == 2
    meant = capsys.readouterr().err.rstrip().rpartition(": estimate ")[2]
    assert main(shlex.split(meant)) in ENDINGS


def test_two_models_are_no_words_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama-7b", "mistral-7b"]) == 2
    assert "is given twice, as 'llama-7b' and 'mistral-7b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "meant"),
    [("2x4090", "--gpus 2x4090"), ("24gb", "--vram 24"), ("512MB", "--vram 512MiB")],
)
def test_a_gpu_that_another_flag_takes_names_it(
    gpu: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpt2", "--gpu", gpu]) == 2
    complaint = capsys.readouterr().err
    assert f"write {meant}" in complaint
    assert main(["gpt2", "--lora", *meant.split()]) in ENDINGS


def test_a_family_begins_the_names_that_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mistral"]) == 2
    offered = capsys.readouterr().err.partition("did you mean ")[2].partition("?")[0].split(", ")
    assert offered and all(name.startswith("mistral-") for name in offered)
