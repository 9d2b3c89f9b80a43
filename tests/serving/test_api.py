"""The API under any combination of options: an answer, or one line that the page can show."""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any

import pytest
from napkinmath.answers.changes import CANDIDATES
from napkinmath.base.errors import NapkinError
from napkinmath.exports import KINDS
from napkinmath.inputs.option_table import BY_KEY
from napkinmath.planning import plan_cluster
from napkinmath.serving import answers
from napkinmath.serving.requests import KNOWN, NUMBERS, SWITCHES, WORDS, options_of
from napkinmath.serving.wording import SHORT, for_the_page, is_on_the_page

REQUESTS = int(os.environ.get("NAPKINMATH_API_REQUESTS", "150"))
SEED = int(os.environ.get("NAPKINMATH_API_SEED", "0"))
HOSTILE = ("", " ", "-1", "0", "1,2", "nan", "1e309", "--hub", "$(id)", "x" * 200, "é٣", ":", "x")
TEXTS: dict[str, tuple[str, ...]] = {
    "arch": ("L2 h64 a2 v256", "L2 h64 a4 kv2 f96 v512 tied", "L2 h64 a2 v256 moe4x2", "h64"),
    "method": ("full", "lora", "qlora", "dora", "qdora", "qalora", "ia3", "prompt", "prefix"),
    "gpus": ("1", "2", "8", "4xT4", "2xRTX 4090", "x", "3xnothing"),
    "data_parallel": ("dp", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"),
    "targets": ("q_proj,v_proj", "all-linear", "nothing", "q_proj,all-linear"),
    "adapter_dtype": ("auto", "fp32", "bf16"),
    "quant": ("nf4", "fp4", "int8", "gptq-int4", "awq-int4", "hqq-int4", "mxfp4", "none"),
    "precision": ("bf16", "bf16-amp", "fp16-autocast", "fp32", "fp8", "tf32"),
    "optimizer": ("adamw", "adamw-8bit", "paged-adamw-8bit", "sgd", "muon", "adafactor", "auto"),
    "checkpointing": ("none", "full", "every:2", "sqrt", "selective", "selective:sdpa", "offload"),
    "attention": ("auto", "eager", "sdpa", "flash2", "flash", "math"),
    "loss": ("hf", "chunked", "fused"),
    "kernels": ("hf", "liger", "unsloth", "axolotl", "napkinmath"),
    "stack": ("hf", "hf-bare", "megatron", "unsloth", "torchtune"),
    "offload": ("optimizer", "parameters", "activations", "checkpoints", "optimizer,parameters"),
    "vram": ("24", "24GiB", "1GiB", "80GB"),
    "mig": ("3g.40gb", "1g.5gb"),
    "dropout": ("0", "0.05", "2"),
    "workload": ("sft", "dpo", "distill", "reward", "grpo", "ppo"),
    "teacher": ("gpt2", "/etc/passwd"),
    "train_modules": ("embed_tokens,lm_head", "lm_head"),
    "freeze": ("embed_tokens", "layers"),
    "display": ("none", "linux", "windows"),
    "allocator": ("expandable_segments:True", "max_split_size_mb:64"),
    "pp_schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "goal": ("tokens/s", "context", "batch", "fewest-changes", "cheapest"),
    "shell": ("posix", "powershell", "cmd"),
}
# What takes longer is asked less often.
PATHS = (
    *("/api/estimate",) * 120,
    *("/api/command",) * 60,
    *(f"/api/export/{kind}" for kind in KINDS for _ in range(6)),
    *("/api/details",) * 6,
    "/api/limits",
    *("/api/plan",) * 2,
)


def asked(chance: random.Random, path: str) -> dict[str, Any]:
    """A small model and some options, each as it should be or not."""
    options: dict[str, Any] = {"arch": TEXTS["arch"][0], "gpu": "T4", "ctx": 64}
    if chance.random() < 0.8:
        options["method"] = chance.choice(("lora", "qlora", "full"))
    if chance.random() < 0.1:
        options["model"] = options.pop("arch") and chance.choice(("gpt2", "smollm2-135m", "../x"))
    names = sorted(KNOWN - {"model"} | answers.WORDS.get(path, frozenset()))
    for name in chance.sample(names, chance.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        options[name] = value_of(chance, name)
    return options


def value_of(chance: random.Random, name: str) -> object:
    if chance.random() < 0.08:
        return chance.choice((*HOSTILE, None, True, 1.5, [], {}, ["a", "b"], 1 << 70))
    if name in SWITCHES:
        return chance.random() < 0.5
    if name in ("grad_accum", "micro_batches"):
        return chance.choice((1, 2, 16))  # each is replayed: the server ends what takes too long
    if name in NUMBERS:
        return chance.choice((1, 2, 3, 4, 8, 16, 64, 1000, 1 << 24))
    if name == "gpu":
        return chance.choice(("T4", "RTX 4090", "A100-SXM4-80GB", "MI300X", ["T4", "L4"], "rtx"))
    known = TEXTS.get(name) or BY_KEY[name].named_choices() or ("1", "2,3", "4GiB", "nothing")
    return chance.choice(known)


def answered(path: str, options: object) -> str:
    """The line that a refusal says, or ''; whatever else is raised is our mistake."""
    try:
        given = options_of(json.dumps(options).encode(), more=answers.WORDS.get(path, frozenset()))
        json.loads(answers.encoded(path, given))
    except NapkinError as error:
        return for_the_page(str(error))
    return ""


@pytest.mark.slow
def test_any_options_are_answered_or_refused_in_one_line_for_the_page() -> None:
    chance, refused = random.Random(SEED), 0
    for number in range(REQUESTS):
        path = chance.choice(PATHS)
        options = asked(chance, path)
        try:
            line = answered(path, options)
        except Exception as error:
            pytest.fail(f"request {number}: {path} {json.dumps(options)}: {error!r}")
        assert "\n" not in line and len(line) < 600, (path, options, line)
        assert not foreign_words(line, options), (path, options, line)
        refused += bool(line)
    assert 0.1 < refused / REQUESTS < 0.9, "both happen"


def foreign_words(line: str, options: object) -> list[str]:
    """Flags that the page has not and that are not said to be the command line's."""
    rest = line.replace("the command line's --", "")
    return [
        flag
        for flag in re.findall(r"(?<![\w'\"-])--(?:no-)?([a-z][a-z0-9-]*)", rest)
        if not is_on_the_page(flag) and f"--{flag}" not in json.dumps(options)
    ]


def test_texts_are_of_options_that_the_page_has() -> None:
    assert WORDS | frozenset().union(*answers.WORDS.values()) >= TEXTS.keys()
    assert SHORT.isdisjoint(KNOWN)


SMALL = {"arch": TEXTS["arch"][0], "gpu": "T4", "ctx": 64, "method": "lora", "bs": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked_for",
    [
        {"adapters": 2},
        {"gpus": "2", "adapters": 2, "targets": "q_proj", "dropout": "0.1"},
        {"gpus": "2xT4", "gpu": None, "method": "qlora", "checkpointing": "full"},
    ],
)
def test_plans_of_adapters_on_one_and_on_several_gpus(asked_for: dict[str, object]) -> None:
    wanted = {**SMALL, **asked_for}
    given = options_of(json.dumps(wanted).encode())
    found = json.loads(answers.encoded("/api/plan", given))
    assert found["best"] and found["num_verified"] >= len(found["best"])
    for row in found["best"]:
        machine = {name: wanted[name] for name in ("arch", "gpu") if wanted[name] is not None}
        taken = options_of(json.dumps({**machine, **row["options"]}).encode())
        report = json.loads(answers.encoded("/api/estimate", taken))["report"]
        assert report["verdict"] == "fits", "a row that is taken over is what was planned"
        assert report["memory"]["requested"] == row["requested_bytes"]
        kept = {"adapters", "gpus", "targets", "method"} & asked_for.keys()
        assert all(str(row["options"].get(name, "1")) == str(wanted[name]) for name in kept)


def test_a_plan_on_several_gpus_says_what_it_did_not_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the command does: a cluster has many meshes, those of short parts are left out."""
    monkeypatch.setattr(plan_cluster, "_MANY_MESHES", 1)
    wanted = {**SMALL, "gpus": "4", "bs": 4, "ctx": 256}
    found = answers.best(options_of(json.dumps(wanted).encode()))
    (note,) = (n for n in found["notes"] if n.startswith("not searched: --cp 2 and more"))
    assert "give --cp to search it" in note
    assert found["best"]


@pytest.mark.parametrize(
    ("asked_for", "words"),
    [
        ({"tp": 2}, "add --gpus 2, or a multiple of it"),
        ({"nodes": 2}, "does not divide"),
        ({"gpus": "2", "goal": "batch"}, "on one GPU"),
        ({"gpus": "2", "gpu": ["T4", "L4"]}, "choose one"),
        ({"goal": "cheapest"}, "prices"),
        ({"gpu": None}, "choose one"),
        ({"method": "full", "adapters": 2}, "no meaning"),
    ],
)
def test_a_plan_that_no_combination_can_run_says_why(
    asked_for: dict[str, object], words: str
) -> None:
    assert words in answered("/api/plan", {**SMALL, **asked_for})


@pytest.mark.parametrize(
    ("message", "worded"),
    [
        ("use --lora, or --no-clip", "use --lora, or --no-clip"),
        ("add --force", "add the command line's --force"),
        ("use `estimate sweep`", "use the command line's `estimate sweep`"),
        ("--hub 'x'\nand --fsdp", "the command line's --hub 'x' and --fsdp"),
        ("model '--hub' is unknown", "model '--hub' is unknown"),
    ],
)
def test_messages_name_what_the_page_has(message: str, worded: str) -> None:
    assert for_the_page(message) == worded


def test_every_change_that_is_shown_can_be_used() -> None:
    flags = [name for c in CANDIDATES for name in re.findall(r"--(?:no-)?([a-z0-9-]+)", c.flag)]
    assert len(flags) >= len(CANDIDATES) and all(map(is_on_the_page, flags))
