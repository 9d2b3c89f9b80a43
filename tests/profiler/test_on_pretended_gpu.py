"""What only a GPU reaches, run over a pretended one: whole commands, so that nothing dies for a
small reason on the first real GPU."""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import campaign
import pytest
import torch
from campaign_parts import accuracy, cases
from napkinmath.calibration import plausible
from napkinmath.cli.main import main
from napkinmath_profiler.calibration import layer_runs, op_classes, op_plan, steady
from napkinmath_profiler.calibration.layer_runs import LayerOptions
from napkinmath_profiler.cli import calibrate as calibrate_cli
from napkinmath_profiler.measuring.device_memory import CudaMemory
from napkinmath_profiler.snapshot.read_snapshot import read_snapshot
from napkinmath_profiler.watch import watch
from profiler.pretended_gpu import pretended_gpu
from torch.cuda import _memory_viz

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "num_hidden_layers": 5,
    "max_position_embeddings": 64,
}
STEP = ("--bs", "2", "--ctx", "32", "--attention", "eager")
WORKSPACES = 2 * (
    32 << 20
)  # cuBLAS's on Hopper: traced and priced for a real one, not made by a pretended one
SAME = 0.02  # a CPU's kernels keep other small tensors, of a model this small
TABLES = 4096  # bitsandbytes keeps its tables of codes on the device


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Operations of a CPU's size beside a few that need a GPU, however slow for one; a cache of our
    own."""
    plan = [
        *list(op_plan._on_cpu())[:3],
        op_plan.op_cases.launches(graphed=True),
        op_plan.op_cases.host_copy(1 << 16, to_host=True, pinned=True),
    ]
    monkeypatch.setattr(op_plan, "_on_gpu", lambda _: plan)
    monkeypatch.setattr(plausible, "MOST_RATIO", math.inf)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_calibrate_and_the_estimate_after_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_host = SimpleNamespace(
        CPU=torch.profiler.ProfilerActivity.CPU, CUDA=torch.profiler.ProfilerActivity.CPU
    )
    monkeypatch.setattr(
        op_classes, "ProfilerActivity", only_host
    )  # named twice, which the profiler refuses
    monkeypatch.setattr(layer_runs, "points_for", lambda batch, length: [(batch, length)])
    monkeypatch.setattr(
        calibrate_cli, "LayerOptions", functools.partial(LayerOptions, rounds=1, num_steps=2)
    )
    with pretended_gpu() as gpu:
        code = main(
            [
                "calibrate",
                "--model",
                model,
                *STEP,
                "--lora",
                "--precision",
                "bf16",
                "--budget",
                "600",
                "--share",
                "0.25",
                "--json",
            ]
        )
        assert gpu.fraction == pytest.approx(0.25 * (80 - 0.5) / 80, abs=0.01)
        assert gpu.books._allocator.allocated == 0  # everything was freed
    found = json.loads(capsys.readouterr().out)
    assert (
        code == 0
        and found["gpu"] == "H100-SXM5-80GB"
        and Path(found["path"]).is_relative_to(tmp_path / "cache")
    )
    assert found["stamp"]["compute_capability"] == "9.0" and found["stamp"]["cuda"] == "13.0"
    assert found["layers"], found["notes"]
    (layers,) = found["layers"]
    assert layers["points"][0]["memory"] is not None, found["notes"]
    assert any(
        "kinds of operation were not measured: ValueError" in note for note in found["notes"]
    )  # and cost nothing else
    timed = {
        (row["op"], row.get("how", row.get("memory"))): "median_s" in row for row in found["ops"]
    }
    assert timed["launch", "graph"] and timed["host copy", "pinned"]
    assert (
        main(
            [
                "--model",
                model,
                *STEP,
                "--lora",
                "--precision",
                "bf16",
                "--gpu",
                "h100",
                "--allow-stale-calibration",
            ]
        )
        == 0
    )
    assert "by real layers" in capsys.readouterr().out


def test_a_gpu_far_off_its_datasheet_is_not_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pretended H100 computes with a processor: nothing is saved or drawn, and what is there
    stays."""
    monkeypatch.setattr(plausible, "MOST_RATIO", 3.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(steady, "smi_facts", lambda _: {"throttling": "0x40", "clock": "300"})
    for command in (["calibrate"], ["bench", "--plot", str(tmp_path / "roof.svg")]):
        with pretended_gpu(busy_bytes=20 << 30):
            assert main([*command, "--budget", "5"]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert "the datasheet of H100-SXM5-80GB implies" in said
        assert "heat" in said and "other processes hold 20.0 GiB" in said and "cores busy" in said
    assert not list(tmp_path.rglob("*.json")) and not (tmp_path / "roof.svg").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_measure_and_its_snapshot(
    model: str, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.pickle"
    with pretended_gpu(count=2) as gpu:
        command = [
            "measure",
            "--device",
            f"cuda:{index}",
            "--model",
            model,
            *STEP,
            "--precision",
            "bf16",
            "--steps",
            "2",
            "--snapshot",
            str(path),
            "--json",
        ]
        assert main(command) == 0
        assert gpu.books._allocator.allocated == 0 and gpu.fraction == 1.0
    sides = json.loads(capsys.readouterr().out)["sides"]
    measured, traced = sides["measured"], sides["traced"]
    assert measured["allocated"] == pytest.approx(traced["allocated"] - WORKSPACES, rel=SAME)
    assert measured["reserved"] >= measured["allocated"]
    snapshot = pickle.loads(path.read_bytes())
    assert f"Device {index}" in _memory_viz.trace(snapshot) and "embed_tokens" in str(
        snapshot["device_traces"][index]
    )
    assert "script" in _memory_viz.trace_plot(snapshot) and "segments" in _memory_viz.segsum(
        snapshot
    )
    assert read_snapshot(path).timeline.peak().nbytes == pytest.approx(
        measured["requested"], rel=SAME
    )


def test_running_out_on_a_busy_slice(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    slice_of = {
        "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "total_bytes": 40 << 30,
        "busy_bytes": 20 << 30,
    }
    with pretended_gpu(**slice_of, limit_bytes=2 << 20) as gpu:
        assert main(["measure", "--model", model, *STEP, "--precision", "bf16"]) == 1
        assert gpu.books._allocator.allocated == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "OUT OF MEMORY" in text and "held parameters" in text
    assert "MIG slice (3g.40gb)" in text and "20.0 GiB of the GPU were taken before" in text


def test_the_campaign_measures_keeps_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cases.CONFIGS, "tinyllama", SMALL)
    plain = {"attention": "eager", "bs": 2, "ctx": 32}
    found = [
        cases.case("tinyllama", 2, history=True, method="full", **plain),
        cases.case("tinyllama", 3, method="lora", checkpointing="full", **plain),
        cases.case("tinyllama", 2, method="qlora", precision="bf16-autocast", **plain),
    ]
    monkeypatch.setattr(campaign, "all_cases", lambda: found)
    monkeypatch.setattr(
        campaign, "watch_overhead", functools.partial(campaign.watch_overhead, rounds=1, steps=1)
    )
    with pretended_gpu() as gpu:
        assert (
            campaign.main(
                ["--budget", "200", "--only", "watching,steps,predictions", "--out", str(tmp_path)]
            )
            == 0
        )
        assert gpu.books._allocator.allocated <= TABLES  # of the watched model, too
    rows = campaign.Rows(tmp_path / "steps.jsonl").rows
    assert [row["status"] for row in rows] == ["measured"] * 3 and not any(
        row["trial"] for row in rows
    )
    assert all(row["memory"]["before_allocated"] == 0 for row in rows)
    for result in accuracy.results_of(tmp_path)[:2]:
        allocated = result.measured["memory"]["allocated"]
        assert result.predicted["traced"]["allocated"] - WORKSPACES == pytest.approx(
            allocated, rel=SAME
        )
        assert result.predicted["analytic"]["allocated"] - WORKSPACES == pytest.approx(
            allocated, rel=SAME
        )
    (line,) = [
        line
        for line in (tmp_path / "report.md").read_text().splitlines()
        if line.startswith("| tinyllama/L2/") and "+0.00%" in line
    ]
    assert line.count("+0.00%") == 2  # allocated and reserved of the replayed history


def test_a_watch_on_a_gpu_reports_and_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    with pretended_gpu(limit_bytes=8 << 20) as gpu:
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)
        )
        with (
            pytest.raises(torch.OutOfMemoryError),
            watch(model, report=path, warn=lambda _: None) as watching,
        ):
            model(torch.randn(64, 256, device="cuda")).sum().backward()
            model(torch.randn(8192, 256, device="cuda"))
        assert isinstance(watching._memory, CudaMemory) and watching.report_path == str(path)
        assert gpu.books._observers and "the device has 80.0 GiB" in path.read_text()
