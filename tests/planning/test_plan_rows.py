"""Rows of plans, on one GPU and on several, are the estimates that their own flags give; over a
seeded sample of models, methods, GPUs, stacks and workloads."""

from __future__ import annotations

import json
import random
import shlex
from typing import Any

import pytest
from napkinmath.base.command_line import flags
from napkinmath.cli.flags import SHARED
from napkinmath.cli.main import main
from napkinmath.cli.parser import Parser
from napkinmath.estimate import estimate
from napkinmath.planning.grid import figures
from napkinmath.serving.answers import encoded
from napkinmath.serving.requests import options_of

MODELS = ("qwen3-0.6b", "llama-3.2-1b", "olmoe-1b-7b", "qwen2-vl-2b", "deepseek-v2-lite")
ONE_GPU = ("t4", "rtx3090", "rtx4090", "h100", "mi300x", "b200")
SEVERAL = ("2xrtx3090", "2xt4", "8xa100-80", "8xh100", "2xmi300x", "4xl40s", "4xb200")
STACKS = ("hf", "hf", "hf-4.57", "hf-4.45", "torchtune", "torchtitan", "megatron", "nanotron")
WORKLOADS = ([], [], ["--workload", "dpo"], ["--workload", "grpo", "--rollout", "vllm"])
OF_THE_MESH = ("gpus", "data_parallel", "tp", "pp", "cp", "ep", "etp", "pp_schedule")
SAMPLE = (1, 4, 6, 7, 9, 11, 13)  # seeds that take about a second each; more were run by hand


def drawn(seed: int) -> list[str]:
    """A plan's words."""
    r = random.Random(seed)
    gpus = ["--gpus", r.choice(SEVERAL)] if seed % 2 else ["--gpu", r.choice(ONE_GPU)]
    more = ["--vram", "14GiB"] if r.random() < 0.3 else []
    more += ["--global-batch", "32"] if seed % 2 and r.random() < 0.5 else []
    return [
        *("--model", r.choice(MODELS), *gpus, f"--{r.choice(('full', 'lora', 'qlora'))}"),
        *("--stack", r.choice(STACKS), "--ctx", r.choice(("512", "1024", "2048"))),
        *("--bs", r.choice(("1", "2")), *r.choice(WORKLOADS), *more),
    ]


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(list(words))
    out = capsys.readouterr().out
    return code, json.loads(out) if out.startswith(("{", "[")) else out


def rerun(row: dict[str, Any], asked: list[str]) -> list[str]:
    """The words of `estimate` that a row gives, on the machine asked about."""
    options = {key: v for key, v in row["options"].items() if key not in OF_THE_MESH}
    mesh = shlex.split(row["mesh"]) if "mesh" in row else ["--gpu", row["gpu"]]
    machine = asked[asked.index("--vram") :][:2] if "--vram" in asked else []
    return [*asked[:2], *mesh, *shlex.split(flags(options)), *machine]


FIGURES = (
    *("requested_bytes", "allocated_bytes", "reserved_bytes", "device_bytes"),
    *("headroom_bytes", "tokens_per_s", "verdict"),
)


def same(row: dict[str, Any], found: dict[str, Any], door: str) -> None:
    """Asserts that another door has a row's figures."""
    for name in FIGURES:
        wanted = row[name]
        if isinstance(wanted, float):
            wanted = pytest.approx(wanted, rel=1e-9)
        assert found[name] == wanted, (door, name)


def reported(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of `--json` under the names of a row."""
    memory = report["memory"]
    return {
        "requested_bytes": memory["requested"],
        **{f"{x}_bytes": memory[x]["value"] for x in ("allocated", "reserved", "device")},
        "headroom_bytes": report["headroom"]["value"],
        "tokens_per_s": report["time"]["all_gpus"]["tokens_per_s"],
        "verdict": report["verdict"],
    }


def options_in(words: list[str]) -> dict[str, Any]:
    """The options that a command's words give, as a request or Python has them."""
    given = Parser("estimate", "", SHARED, positional=("job", "J", "")).parse(words)
    return {k: v[0] if isinstance(v, list) else v for k, v in given.items()}


def of_the_page(path: str, options: dict[str, Any]) -> dict[str, Any]:
    asked = options_of(json.dumps(options).encode(), more=frozenset(("goal",)))
    return json.loads(encoded(f"/api/{path}", asked))


TAKEN_OVER = [
    {"allocator": "roundup_power2_divisions:4", "vram": "9GiB", "grad_accum": 4, "gpu": "rtx4090"},
    {"display": "windows", "method": "qlora", "goal": "context", "gpu": "rtx3060"},
    {"gpus": "2xmi300x", "nodes": 2, "network": "ethernet:25", "stack": "torchtitan"},
    {"gpus": "2xl40s", "allocator": "expandable_segments:True", "workload": "dpo"},
]


@pytest.mark.slow
@pytest.mark.parametrize("asked", TAKEN_OVER)
def test_a_plan_row_of_the_page_taken_over_is_what_the_page_answers(asked: dict[str, Any]) -> None:
    """Taking a row over clears every field but the model, the GPU and what the row has."""
    asked = {"model": "qwen3-0.6b", "method": "lora", "ctx": 512, **asked}
    found = of_the_page("plan", asked)["best"]
    assert found
    kept = {key: asked[key] for key in ("model", "gpu") if key in asked}
    for row in found[:3]:
        same(row, reported(of_the_page("estimate", kept | row["options"])["report"]), "estimate")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SAMPLE)
def test_rows_are_the_estimates_of_their_own_flags(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = drawn(seed)
    code, found = answered(capsys, "plan", *asked, "--json", "--top", "2")
    assert code in (0, 1)
    for row in found if isinstance(found, list) else found["best"]:
        words = rerun(row, asked)
        code, e = answered(capsys, *words, "--json")
        assert code == 0, words
        assert not [f for f in e["findings"] if "does not run" in f["text"]], words
        same(row, reported(e), "plan")
        same(row, answered(capsys, "check", *words, "--json")[1], "check")
        same(row, answered(capsys, "sweep", *words, "--json")[1][0], "sweep")
        options = options_in(words)
        same(row, figures(estimate(**options)), "Python")  # pyright: ignore[reportArgumentType]
        same(row, reported(of_the_page("estimate", options)["report"]), "page")


FEW = ["--lora", "--optimizer", "adamw-8bit", "--kernels", "hf", "--precision", "bf16"]
PAIRS = ["--gpus", "4xl40s", "--lora", "--workload", "dpo", "--ctx", "512", "--global-batch", "16"]
MACHINES = [
    [*("--gpu", "rtx4090", "--vram", "9GiB", "--allocator", "expandable_segments:True"), *FEW],
    [*("--gpus", "4xl40s", "--vram", "9GiB", "--nodes", "2", "--network", "roce:200"), "--lora"],
    [*PAIRS, "--stack", "torchtitan"],
    [*("--gpus", "2xmi300x", "--pp", "2", "--lora", "--stack", "torchtitan"), "--grad-accum", "4"],
]
"""What a row's command lost: the machine, the allocator, what a pair counts as, the types of a rank
without a strategy."""


@pytest.mark.slow
@pytest.mark.parametrize("asked", MACHINES)
def test_the_command_under_the_table_is_the_first_row(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "qwen3-0.6b", *asked, "--bs", "2", "--checkpointing", "full"]
    _, found = answered(capsys, "plan", *words, "--json", "--top", "1")
    (first,) = found if isinstance(found, list) else found["best"]
    _, text = answered(capsys, "plan", *words, "--top", "1")
    (line,) = (line for line in text.splitlines() if line.startswith("run it:"))
    code, e = answered(capsys, *shlex.split(line)[3:], "--json")
    assert code == 0 and e["memory"]["device"]["value"] == first["device_bytes"]
    speed = (e["time"].get("all_gpus") or e["time"])["tokens_per_s"]
    assert speed == pytest.approx(first["tokens_per_s"], rel=1e-9)


@pytest.mark.slow
def test_two_gpus_are_not_slower_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "qwen3-0.6b", "--lora", "--ctx", "1024", "--json", "--top", "1"]
    alone = answered(capsys, *words, "--gpu", "rtx3090", "--kernels", "hf")[1]["best"][0]
    (both,) = answered(capsys, *words, "--gpus", "2xrtx3090", "--bs", str(alone["options"]["bs"]))[
        1
    ]
    assert both["tokens_per_s"] >= alone["tokens_per_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "strategies", "axes"),
    [
        (["--stack", "hf-4.45"], {"ddp", "zero1", "zero3", "fsdp1"}, set[str]()),
        (["--stack", "torchtune", "--full"], {"fsdp2"}, {"--tp", "--cp"}),
        (["--stack", "torchtitan", "--full"], {"ddp", "fsdp2"}, {"--tp", "--cp", "--pp"}),
        (["--tp", "2"], {"fsdp2"}, {"--tp", "--cp"}),
    ],
)
def test_a_plan_has_only_meshes_that_the_trainer_runs(
    options: list[str],
    strategies: set[str],
    axes: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "qwen3-0.6b", "--gpus", "4xh100", "--ctx", "1024", "--bs", "4", *options]
    _, rows = answered(capsys, "plan", *words, "--json", "--top", "40")
    assert len(rows) >= len(strategies)
    for row in rows:
        mesh = shlex.split(row["mesh"])
        named = mesh[mesh.index("--data-parallel") + 1] if "--data-parallel" in mesh else None
        assert named in strategies or (named is None and mesh[2] in axes)
        degrees = {word for word in mesh if word in ("--tp", "--cp", "--pp", "--ep")}
        assert degrees <= axes


def test_a_batch_for_meshes_that_no_trainer_runs_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "qwen3-0.6b", "--gpus", "8xh100", "--lora", "--global-batch", "4"]
    assert main(["plan", *words, "--bs", "1", "--stack", "torchtune"]) == 2
    said = capsys.readouterr().err
    assert "does not run" in said and "--stack" in said
