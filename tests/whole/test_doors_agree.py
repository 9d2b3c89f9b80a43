"""One job through every door gives one answer: the report, `--json`, `check`, `sweep`, `batch`,
`plan`, the page, Python and preflight say the same memory, headroom, verdict, speed and limits."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import napkinmath
import pytest
from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import headroom_bytes
from napkinmath.base.command_line import command
from napkinmath.base.units import GIB
from napkinmath.config.train_config import Precision
from napkinmath.estimate import Estimate
from napkinmath.planning.search import reaches
from napkinmath.serving.answers import encoded
from napkinmath.serving.requests import options_of

from tests.cli.runs import run

TINY = "L2 h64 a4 kv2 f128 v256"
WIDE = "L4 h512 a8 kv2 f1408 v32000"
OF_LETTERS = {
    "L": "num_hidden_layers",
    "h": "hidden_size",
    "a": "num_attention_heads",
    "kv": "num_key_value_heads",
    "f": "intermediate_size",
    "v": "vocab_size",
}
LAST_DIGIT = 0.5000001  # of the last printed digit: numbers are rounded for people
SAME_SUM = 1e-12  # relative: a grid adds seconds in another order than one estimate

JOBS: dict[str, dict[str, object]] = {
    "full": {"arch": TINY, "ctx": 64, "gpu": "rtx4090"},
    "T4, fp16": {"arch": WIDE, "ctx": 128, "gpu": "T4", "precision": "fp16-autocast"},
    "V100, bf16": {"arch": WIDE, "ctx": 128, "gpu": "V100", "precision": "bf16"},
    "MI300X": {"arch": WIDE, "ctx": 512, "bs": 4, "gpu": "MI300X"},
    "B200, accumulated": {"arch": WIDE, "ctx": 512, "grad_accum": 8, "gpu": "B200"},
    "lora": {"model": "gpt2", "method": "lora", "ctx": 256, "bs": 2, "gpu": "L4"},
    "a trainer's stack": {
        **{"model": "bert-base-uncased", "method": "lora", "ctx": 64},
        **{"stack": "torchtune", "optimizer": "adamw-8bit", "gpu": "L4"},
    },
    "qlora": {"model": "smollm2-135m", "method": "qlora", "ctx": 256, "gpu": "rtx3060"},
    "checkpointing": {"arch": WIDE, "checkpointing": "full", "bs": 8, "gpu": "A100-40"},
    "8-bit Adam": {"arch": WIDE, "optimizer": "adamw-8bit", "ctx": 256, "gpu": "L4"},
    "does not fit": {"model": "gpt2", "bs": 8, "ctx": 1024, "vram": "3GiB"},
    "just fits": {"model": "gpt2", "ctx": 128, "vram": "3GiB"},
    "expandable": {
        "arch": WIDE,
        "ctx": 256,
        "gpu": "L4",
        "allocator": "expandable_segments:True",
    },
    "display": {"arch": WIDE, "ctx": 256, "gpu": "rtx4090", "display": "windows"},
    "offload": {"arch": WIDE, "ctx": 256, "gpu": "rtx4090", "offload": "optimizer"},
    "dpo": {"arch": TINY, "ctx": 64, "workload": "dpo", "gpu": "rtx4090"},
    "engine": {
        "arch": TINY,
        "ctx": 64,
        "workload": "grpo",
        "completion": 32,
        "rollout": "vllm",
        "gpu": "L4",
    },
    "sound": {"model": "wav2vec2-base-960h", "audio": "5", "gpu": "T4"},
    "no GPU": {"arch": TINY, "ctx": 64},
    "ddp": {"arch": TINY, "ctx": 64, "data_parallel": "ddp", "gpus": "2xH100"},
    "fsdp": {"arch": TINY, "ctx": 64, "data_parallel": "fsdp2", "gpus": "4xA100-80"},
    "tp": {"arch": TINY, "ctx": 64, "gpus": "2xH100", "tp": 2},
    "pp": {"arch": TINY, "ctx": 64, "gpus": "2xH100", "pp": 2, "micro_batches": 4},
}
WHOLE = ("full", "T4, fp16", "lora", "does not fit", "just fits", "engine", "no GPU", "ddp", "tp")


def words(options: Mapping[str, object]) -> list[str]:
    """The flags of a job, as the page's own command writes them."""
    return shlex.split(command(dict(options)))[1:]


def one_batch(argv: list[str]) -> list[str]:
    """A batch of one, where the job leaves it out: a grid has one value, a search no choice."""
    return [] if "--bs" in argv else ["--bs", "1"]


def asked_of_the_page(path: str, options: Mapping[str, object]) -> dict[str, Any]:
    """The answer to a request whose body has these options."""
    return json.loads(encoded(f"/api/{path}", options_of(json.dumps(options).encode())))


def row_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that every table has, from `--json`."""
    memory, time, spare = report["memory"], report["time"], report["headroom"]
    return {
        "requested_bytes": memory["requested"],
        **{f"{x}_bytes": memory[x]["value"] for x in ("allocated", "reserved", "device")},
        "headroom_bytes": None if spare is None else spare["value"],
        "peak_phase": report["peak"]["phase"],
        "seconds": time and time["seconds"],
        "tokens_per_s": time and time["all_gpus"]["tokens_per_s"],
        "verdict": report["verdict"] if spare else None,
    }


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], door: str) -> None:
    """Every figure of a row that the door has."""
    for name in (name for name in expected if name in found):
        wanted = expected[name]
        if isinstance(wanted, float):
            wanted = pytest.approx(wanted, rel=SAME_SUM)
        assert found[name] == wanted, (door, name)


def printed(pattern: str, text: str, expected: float) -> None:
    """Asserts that the number which the report prints is this one, rounded."""
    found = re.search(pattern, text)
    assert found, (pattern, text)
    shown = found[1].replace(",", "")
    digit = 10.0 ** -len(shown.partition(".")[2])
    assert abs(float(shown) - expected) <= LAST_DIGIT * digit, (pattern, shown, expected)


@pytest.mark.filterwarnings("ignore:--precision")  # what Python says was decided for it
@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_every_door_gives_the_same_figures(options: dict[str, object], tmp_path: Path) -> None:
    argv, report = words(options), asked_of_the_page("estimate", options)["report"]
    row = row_of(report)
    assert_python(options, report, row)
    if options.keys() & {"gpu", "gpus", "vram"}:
        checked = run("check", *argv, "--json")
        assert_same(json.loads(checked.out), row, "check")
        assert checked.code == report["exit_code"]
    if "gpus" not in options:
        swept = json.loads(run("sweep", *argv, *one_batch(argv), "--json").out)
        assert_same(swept[0], row, "sweep")
    job = tmp_path / "job.jsonl"
    job.write_text(json.dumps(options) + "\n")
    for more in ([], ["--exact"]):
        out = tmp_path / f"answers{len(more)}.jsonl"
        assert run("batch", str(job), "--out", str(out), *more).code == 0
        line = json.loads(out.read_text())
        if not more and line["verdict"] == Verdict.UNKNOWN.value:
            line.pop("verdict")  # requested bytes alone tell less, and nothing else
        assert_same(line, row, "batch")
        assert not more or row.keys() <= line.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_report_the_page_and_python_give_the_same_limits(name: str) -> None:
    options = JOBS[name]
    argv = words(options)
    report: dict[str, Any] = json.loads(run(*argv, "--json").out)
    page = asked_of_the_page("estimate", options)["report"]
    assert page == {name: report[name] for name in page}
    details, limits = (asked_of_the_page(x, options) for x in ("details", "limits"))
    for key in ("largest", "remedy", "changes", "findings", "fits_on"):
        assert details[key] == report[key]
    largest = report["largest"] or {}
    found = {what: largest[what] for what in ("batch", "context") if largest.get(what)}
    assert {what: limits[what] for what in found} == found
    e = napkinmath.estimate(**options)  # pyright: ignore[reportArgumentType]
    assert {reach.what: reach.size for reach in reaches(e) if reach.size} == found
    assert_printed(run(*argv).out, report)


def figures_of(e: Estimate) -> dict[str, Any]:
    """The row of an estimate in Python."""
    return {
        "requested_bytes": e.peak.nbytes,
        "allocated_bytes": e.memory.allocated.value,
        "reserved_bytes": e.memory.reserved.value,
        "device_bytes": e.memory.device.value,
        "headroom_bytes": headroom_bytes(e),
        "seconds": e.time and e.time.seconds,
        "tokens_per_s": e.throughput and e.throughput.tokens_per_s,
    }


def assert_python(
    options: Mapping[str, object], report: dict[str, Any], row: dict[str, Any]
) -> None:
    """`napkinmath.estimate` with flags as keywords."""
    e = napkinmath.estimate(**options)  # pyright: ignore[reportArgumentType]
    assert_same(figures_of(e), row, "Python")
    assert e.verdict.value == report["verdict"]


def assert_printed(text: str, report: dict[str, Any]) -> None:
    """The report for people, whose numbers are rounded."""
    memory, spare, time = report["memory"], report["headroom"], report["time"]
    for name in ("allocated", "reserved", "device"):
        printed(rf"{name} <?([\d.,]+)", text, memory[name]["value"] / GIB)
    if report["verdict"] == "fits":
        printed(r"FITS +([\d.,]+) GiB to spare", text, spare["value"] / GIB)
    assert ("DOES NOT FIT" in text) == (report["verdict"] == "does not fit")
    if time:
        printed(r"([\d.,]+) tokens/s", text, time["all_gpus"]["tokens_per_s_per_gpu"])
    for what in ("batch", "context"):
        size = (report["largest"] or {}).get(what)
        if size:
            printed(rf"{what} up to ([\d.,]+)", text, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["just fits", "display"])
def test_a_plan_prices_the_job_as_it_is(name: str) -> None:
    options = JOBS[name]
    argv = words(options)
    argv += one_batch(argv)
    row = row_of(json.loads(run(*argv, "--json").out))
    plan = json.loads(run("plan", *argv, "--top", "1000", "--json").out)
    own = [one for one in plan["best"] if not one["changes"]]
    assert len(own) == 1
    assert_same(own[0], row, "plan")


LIVE = (  # of one GPU and a step that transformers runs
    "full",
    "expandable",
    "V100, bf16",
    "MI300X",
    "B200, accumulated",
    "checkpointing",
    "8-bit Adam",
    "display",
    "dpo",
    "no GPU",
)


@pytest.mark.torch
@pytest.mark.parametrize("name", LIVE)
def test_preflight_says_of_the_live_model_what_the_report_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from napkinmath_profiler.preflight import preflight
    from napkinmath_profiler.trace import prepared_model
    from napkinmath_profiler.tracing.meta_model import config_from
    from napkinmath_profiler.tracing.trace_options import options_from

    options = JOBS[name]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", str(options.get("allocator", "")))
    e = napkinmath.estimate(**options)  # pyright: ignore[reportArgumentType]
    sizes = {
        letters: int(size) for letters, size in re.findall(r"([a-zL]+)(\d+)", str(options["arch"]))
    }
    config = {"model_type": "llama", **{OF_LETTERS[key]: size for key, size in sizes.items()}}
    found = preflight(
        prepared_model(config_from(config), options_from(e.config)),
        e.config.optimizer,
        (e.config.micro_batch_size, e.config.sequence_length),
        hardware=e.hardware,
        autocast_dtype=torch.bfloat16 if e.config.precision is Precision.BF16_AUTOCAST else None,
        train_config=e.config,
    ).estimate
    row = row_of(asked_of_the_page("estimate", options)["report"])
    assert_same(figures_of(found), row, "preflight")
    assert found.verdict is e.verdict


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def doors() -> ModuleType:
    """The script that compares the doors and recorded it."""
    place = BENCHMARKS / "accuracy" / "doors.py"
    spec = importlib.util.spec_from_file_location("benchmark_doors", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SEEDED = 12  # of the 200 whose comparison is recorded; all of it takes minutes


@pytest.mark.slow
def test_configurations_drawn_with_a_seed_get_one_answer_at_every_door(tmp_path: Path) -> None:
    """Refusals, links of the page and lengths that change among them."""
    script = doors()
    asked = script.configurations(200, 14)
    changing = [options for options in asked if "lengths" in options and "gpus" not in options]
    counts, wrong = script.compared([*asked[:SEEDED], *changing[:2]], tmp_path)
    assert not wrong, "\n".join(wrong)
    assert {"flags", "job file", "Python", "request", "batch", "sweep"} <= counts.keys()
    assert all(found["same figures"] for found in counts.values())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_kinds_that_are_not_drawn_get_one_answer_at_every_door(first: int, tmp_path: Path) -> None:
    """One in eight; all are compared where the 200 are."""
    script = doors()
    counts, wrong = script.compared(list(script.KINDS[first::32]), tmp_path)
    assert not wrong, "\n".join(wrong)
    assert counts["flags"]["same figures"]


def test_the_recorded_comparison_of_doors_found_no_difference() -> None:
    recorded = json.loads(
        (BENCHMARKS / "results" / "cpu" / "doors.json").read_text(encoding="utf-8")
    )
    assert recorded["configurations"] == 200 and recorded["kinds"] == len(doors().KINDS)
    for door, found in recorded["doors"].items():
        assert not found.get("differs") and found["same figures"] >= 150, door
