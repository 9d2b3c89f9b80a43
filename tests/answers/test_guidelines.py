"""Each guideline agrees where the field is right and disagrees where the numbers say otherwise."""

from __future__ import annotations

import shlex

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
