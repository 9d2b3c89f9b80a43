"""Each guideline agrees where the field is right and disagrees where the numbers say otherwise."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster
from napkinmath.config.lengths import SAMPLE, padded_share, read_lengths, thinned
from napkinmath.estimate import estimate
from napkinmath.inputs.options import train_config
from napkinmath.planning.guidelines import Advice, guidelines


def advice(name: str, model: str, gpu: str, **options: object) -> Advice:
    return among(guidelines(estimate(model, train_config(options), hardware=gpu)), name)


def among(rows: tuple[Advice, ...], name: str) -> Advice:
    return {row.name: row for row in rows}[name]


# (guideline, model, gpu, options, whether the numbers agree with the field, a word of what they
# say)
ROWS: list[tuple[str, str, str, dict[str, object], bool, str]] = [
    ("bf16", "llama-3.2-1b", "a100-80", {}, True, "against tf32"),
    ("bf16", "gpt2", "t4", {}, False, "fp16"),
    ("flash attention", "llama-3.2-1b", "a100-80", {"ctx": 4096}, True, "faster"),
    ("flash attention", "gpt2", "t4", {"ctx": 128}, False, "at 128 tokens"),
    ("LoRA", "llama-3.1-8b", "h100", {"method": "lora"}, True, "against full fine-tuning"),
    ("LoRA", "llama-3.2-1b", "h100", {"ctx": 8192, "bs": 4}, False, "activations stay"),
    (
        "QLoRA",
        "llama-3.1-8b",
        "rtx4090",
        {"method": "qlora", "ctx": 512},
        True,
        "against 16-bit weights",
    ),
    ("QLoRA", "llama-3.1-8b", "a100-80", {"method": "lora", "bs": 4, "ctx": 2048}, False, "slower"),
    ("checkpointing", "llama-3.2-1b", "h100", {"ctx": 8192, "bs": 4}, True, "longer"),
    ("checkpointing", "gpt2", "t4", {"ctx": 128, "precision": "fp16-amp"}, False, "too little"),
    (
        "checkpointing",
        "llama-3.1-8b",
        "a100-80",
        {"method": "lora", "bs": 2},
        False,
        "half of the products",
    ),
    ("packing", "gpt2", "l4", {"lengths": "100,900,100,200", "bs": 8}, True, "padding"),
    ("packing", "gpt2", "l4", {"lengths": "512,512,510", "bs": 8}, False, "0% of what"),
    (
        "8-bit optimizer",
        "llama-3.2-1b",
        "a100-80",
        {"checkpointing": "full"},
        True,
        "less at the peak",
    ),
    ("8-bit optimizer", "llama-3.2-1b", "a100-80", {"method": "lora"}, False, "the states are"),
    (
        "gradient accumulation",
        "gpt2",
        "a100-80",
        {"grad_accum": 8, "ctx": 128},
        False,
        "--bs 2 --grad-accum 4 fits",
    ),
    (
        "gradient accumulation",
        "llama-3.1-8b",
        "a100-80",
        {"method": "lora", "bs": 4, "grad_accum": 2},
        True,
        "does not surely fit",
    ),
    ("bound", "llama-3.2-1b", "h100", {"ctx": 8192, "bs": 4}, True, "FLOP/s"),
    ("bound", "llama-3.1-8b", "rtx4090", {"method": "qlora", "ctx": 512}, False, "bandwidth"),
]


@pytest.mark.parametrize(
    ("name", "model", "gpu", "options", "agrees", "word"), ROWS, ids=lambda value: str(value)[:24]
)
def test_guideline(
    name: str, model: str, gpu: str, options: dict[str, object], agrees: bool, word: str
) -> None:
    found = advice(name, model, gpu, **options)
    assert found.agrees is agrees and word in found.here, found


def test_figures_are_those_of_two_estimates() -> None:
    found = advice("checkpointing", "llama-3.2-1b", "a100-80", bs=4)
    on, off = (
        estimate("llama-3.2-1b", train_config({"bs": 4, "checkpointing": kind}), hardware="a100-80")
        for kind in ("full", "none")
    )
    assert on.time is not None and off.time is not None
    slower = off.time.tokens_per_s / on.time.tokens_per_s - 1
    assert (
        f"{slower:.0%} longer" in found.here
        and f"{(off.peak.nbytes - on.peak.nbytes) / 2**30:.1f} GiB" in found.here
    )


def test_the_recipe_for_several_gpus_is_priced_beside_what_is_run() -> None:
    four = Cluster(hardware=find_hardware("rtx4090"), gpus_per_node=4)
    runs: tuple[dict[str, object], ...] = (
        {"method": "full", "zero": 2},
        {"method": "qlora", "bs": 2, "zero": 1},
    )
    full, packed = (
        among(
            guidelines(estimate("llama-3.1-8b", train_config({"gpus": 4, **o}), hardware=four)),
            "several GPUs",
        )
        for o in runs
    )
    assert (
        full.agrees
        and "fits and is" in full.here
        and "GiB" in full.here
        and "less a GPU" in full.here
    )
    assert not packed.agrees and "slower than this" in packed.here
    assert "several GPUs" not in {row.name for row in guidelines(estimate("gpt2", hardware="t4"))}
    done = run(
        "plan",
        "--model",
        "llama-3.2-1b",
        "--gpus",
        "2xrtx3060-12",
        "--ctx",
        "1k",
        "--bs",
        "1",
        "--top",
        "2",
    )
    again = shlex.split(done.out.splitlines()[-1].removeprefix("run it:"))
    assert (
        done.code == 0
        and again[:3] == ["estimate", "--model", "llama-3.2-1b"]
        and run(*again[1:]).code == 0
    )


def test_those_that_disagree_come_first_and_a_gpu_is_needed() -> None:
    found = [
        row.agrees
        for row in guidelines(estimate("gpt2", train_config({"ctx": 128}), hardware="t4"))
    ]
    assert found == sorted(found) and len(found) > 5
    with pytest.raises(InputError):
        guidelines(estimate("gpt2"))
    done = run("plan", "--model", "llama-3.2-1b", "--lora", "--gpu", "rtx3060-12", "--ctx", "1k")
    assert "8-bit optimizer" in done.out


def test_padding_is_what_drawn_batches_have() -> None:
    draw = random.Random(2)
    lengths = [draw.choice((40, 90, 300, 1500)) for _ in range(500)]
    for batch in (1, 2, 8):
        longest = [max(draw.choices(lengths, k=batch)) for _ in range(20_000)]
        drawn = 1 - sum(lengths) / len(lengths) / (sum(longest) / len(longest))
        assert padded_share(lengths, batch) == pytest.approx(drawn, abs=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "512\n1024\n2048\n",
        "512, 1024, 2048",
        "[512, 1024, 2048]",
        '{"length": 512}\n{"length": 1024}\n{"length": 2048}\n',
    ],
)
def test_lengths_from_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    assert read_lengths(str(file)) == (512, 1024, 2048)
    done = run("--model", "gpt2", "--lengths", str(file), "--json")
    assert (
        done.code == 0
        and done.out == run("--model", "gpt2", "--lengths", "512,1024,2048", "--json").out
    )
    assert run("sweep", "--model", "gpt2", "--lengths", str(file), "--bs", "1,2").code == 0
    with pytest.raises(InputError):
        train_config(
            {"lengths": str(file)}
        )  # a path in options that came from elsewhere is not read


@pytest.mark.parametrize(
    "text", ["", "12,x", "0", "-4", "1.5", '{"len": 3}', '{"length": 3}\nnonsense']
)
def test_files_without_lengths_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(InputError, match="--lengths"):
        read_lengths(str(file))
    with pytest.raises(InputError, match="no-such-file"):
        read_lengths(str(tmp_path / "no-such-file"))


def test_a_long_sample_is_thinned_without_losing_its_ends() -> None:
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(6, 1)) + 1 for _ in range(100_000)]
    few = thinned(lengths)
    assert len(few) == SAMPLE and min(few) == min(lengths) and max(few) == max(lengths)
    assert sum(few) / len(few) == pytest.approx(sum(lengths) / len(lengths), rel=0.02)
    assert padded_share(few, 8) == pytest.approx(padded_share(lengths, 8), abs=0.01)
