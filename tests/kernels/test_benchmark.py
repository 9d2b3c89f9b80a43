"""The benchmark program, tried on a CPU: its rows, its marks, and how it treats contestants that
fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "kernels"))
import kernel_speed  # noqa: E402
from kernel_rows import quantized, steps  # noqa: E402
from kernel_rows.timing import Case, Clock, Goal, Rows, run_case  # noqa: E402


def run_benchmark(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels" / "kernel_speed.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_trial_on_a_cpu_writes_marked_rows_and_a_table(tmp_path):
    run = run_benchmark(
        "--device", "cpu", "--budget", "30", "--out", str(tmp_path), "--only", "norm"
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert all(row["trial"] and "says nothing about a GPU" in row["device"] for row in rows)
    measured = [row for row in rows if row["status"] == "measured"]
    assert {row["contestant"] for row in measured} >= {"napkinmath", "torch"} and all(
        row["median_s"] > 0 for row in measured
    )
    assert not [row for row in rows if row["status"] in ("met", "missed", "failed", "wrong")]
    assert {row["op"] for row in rows if row["status"] == "right"} >= {
        "rms_norm",
        "attention",
        "linear cross-entropy",
    }
    assert "of copy" in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    run = run_benchmark("--out", str(tmp_path))
    assert run.returncode == 2 and "--device cpu" in run.stderr


def test_without_bitsandbytes_the_rest_is_measured(monkeypatch):
    """A GPU machine may have neither it nor a network: its rows say so, and ours are of weights
    that our own quantizer made."""
    monkeypatch.setattr(quantized, "version_of", lambda package: None)
    monkeypatch.setattr(steps, "version_of", lambda package: None)
    found = [
        case
        for make in (quantized.dequantize_cases, quantized.qlora_cases)
        for case in make(torch.device("cpu"), True)
    ]
    assert [list(case.contestants) for case in found] == [["napkinmath"]] * 2
    assert all(
        "bitsandbytes: not installed" in reason
        for case in found
        for name, reason in case.absent.items()
        if name != "unsloth"
    )
    for case in found:
        case.contestants["napkinmath"](case.make_inputs())
    assert not steps.is_quantized()


def test_a_group_of_cases_that_cannot_be_made_is_a_row(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", {})
    with kernel_speed.failures_as_rows(rows, "loss"):
        raise ImportError("no such peer")
    rows.close()
    assert rows.rows[0]["op"] == "loss" and rows.rows[0]["reason"] == "ImportError: no such peer"


def rows_of(tmp_path, case, budget=5.0):
    rows = Rows(tmp_path / "rows.jsonl", {})
    run_case(case, Clock(torch.device("cpu"), budget), rows, {"copy_bytes_per_s": 1e9}, 0.05)
    rows.close()
    return rows.rows


def sleepy(seconds):
    import time

    return lambda _: time.sleep(seconds)


def test_goals_are_met_and_missed_by_the_medians(tmp_path):
    goals = {
        "fast": Goal(">= 1x", 1.0),
        "slow": Goal(">= 1.5x", 1.5),
        "copy": Goal(">= 0.8", 0.8),
        "absent": Goal(">= 2x", 2.0),
    }
    contestants = {"napkinmath": sleepy(0.002), "fast": sleepy(0.0005), "slow": sleepy(0.006)}
    found = rows_of(
        tmp_path, Case("op", "1", lambda: None, contestants, 1, traffic_bytes=10, goals=goals)
    )
    verdicts = {row["against"]: row["status"] for row in found if row["contestant"] == "goal"}
    assert verdicts == {"fast": "missed", "slow": "met", "copy": "missed", "absent": "not measured"}


def test_a_failing_contestant_is_a_row(tmp_path):
    def fail(_):
        raise RuntimeError("no such kernel\nmore")

    found = rows_of(
        tmp_path, Case("op", "1", lambda: None, {"napkinmath": sleepy(0.001), "peer": fail}, 1)
    )
    assert [row["reason"] for row in found if row["status"] == "failed"] == [
        "RuntimeError: no such kernel"
    ]
    assert [row["contestant"] for row in found if row["status"] == "measured"] == ["napkinmath"]


def test_a_spent_budget_is_a_row(tmp_path):
    found = rows_of(
        tmp_path, Case("op", "1", lambda: None, {"napkinmath": sleepy(0.001)}, 1), budget=0.0
    )
    assert found[0]["status"] == "not measured" and "budget" in found[0]["reason"]


def test_a_second_run_adds_to_the_rows_of_the_first(tmp_path):
    path, common = tmp_path / "kernels.jsonl", {"device": "A GPU", "trial": False}
    rows = Rows(path, common)
    rows.add(op="rope", shape="8", contestant="napkinmath", status="measured")
    rows.add(op="rope", shape="9", contestant="napkinmath", status="not measured")
    rows.close()
    with path.open("a") as file:
        file.write('{"op": "cut off')
    again = Rows(path, common)
    assert again.is_measured("rope", "8") and not again.is_measured("rope", "9")
    again.add(op="rope", shape="9", contestant="napkinmath", status="measured")
    again.close()
    for device, known in (("A GPU", True), ("Another", False)):
        third = Rows(path, common | {"device": device})
        assert third.is_measured("rope", "9") is known
        third.close()
