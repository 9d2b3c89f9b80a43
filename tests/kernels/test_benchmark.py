"""The benchmark program, tried on a CPU: its rows, its marks, and how it treats contestants that
fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "kernels"))
import kernel_speed  # noqa: E402
from kernel_rows import quantized, steps, timing  # noqa: E402
from kernel_rows.goals import COPY, LOST  # noqa: E402
from kernel_rows.lost_context import ContextLost  # noqa: E402
from kernel_rows.timing import Case, Clock, Goal, Rows, run_case  # noqa: E402

# A sum W + BA rounded to 8 bits, and products of rounded numbers: some 2^-8 each.
BF16_TWICE_ROUNDED = 2**-6


def run_benchmark(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels" / "kernel_speed.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_trial_on_a_cpu_writes_marked_rows_and_a_table(tmp_path):
    run = run_benchmark(
        "--device", "cpu", "--budget", "600", "--out", str(tmp_path), "--only", "norm"
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
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert kernel_speed.main(["--out", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_timed_and_with_whom(capsys, monkeypatch):
    """At the goals' sizes, without a GPU or a folder; what is not installed is said before."""
    monkeypatch.setattr(kernel_speed.quantized, "version_of", lambda _: None)
    assert kernel_speed.main(["--dry-run", "--only", "qlora linear"]) == 0
    out = capsys.readouterr().out
    assert "8192 tokens, 4096 -> 14336" in out and "without unsloth's algorithm" in out
    assert "bitsandbytes: not installed" in out and "5 comparisons" in out
    assert kernel_speed.main(["--dry-run", "--only", "qloara"]) == 2
    assert "'qloara' is in no operation's name" in capsys.readouterr().err


def test_both_ways_through_adapted_experts_have_the_same_gradients():
    """PEFT's algorithm is re-created: what is timed computes the same."""
    (case,) = kernel_speed.experts.cases(torch.device("cpu"), True)
    given = case.make_inputs()
    ours, theirs = (call(given) for call in case.contestants.values())
    for mine, other in zip(ours, theirs, strict=True):
        wide = other.double()
        assert (mine.double() - wide).norm() < BF16_TWICE_ROUNDED * wide.norm() > 0


def test_everything_is_compiled_before_it_is_timed(tmp_path, monkeypatch):
    """By a process a case; one that fails or hangs costs its own case no more than time."""
    rows = Rows(tmp_path / "rows.jsonl", {})
    cases = kernel_speed.make_cases(rows, torch.device("cpu"), "norm")
    rows.close()
    kernel_speed.compile_one(next(iter(cases)), torch.device("cpu"))
    started = []

    def run(command, timeout, **_):
        started.append(command[command.index("--compile-only") + 1])
        if started[-1] == "4:1":
            raise subprocess.TimeoutExpired(command, timeout)
        broken = started[-1] == "4:2"
        return subprocess.CompletedProcess(command, int(broken), "", "first\nPTXASError: no")

    monkeypatch.setattr(kernel_speed.subprocess, "run", run)
    left = kernel_speed.compile_all(cases, torch.device("cpu"), 60.0, workers=2)
    assert sorted(started) == sorted(cases) and len(cases) == 4
    assert left == {"4:1": "out of time", "4:2": "PTXASError: no"}


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
    assert [list(case.contestants) for case in found] == [["napkinmath"]] * 3
    assert all(
        "bitsandbytes: not installed" in reason for case in found for reason in case.absent.values()
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
    assert [row["contestant"] for row in found if row["status"] == "measured"].count("copy") == 1
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


def test_what_breaks_the_context_is_left_out_by_the_process_that_goes_on(tmp_path, monkeypatch):
    """The rows of those timed before it are kept; the next process times the others."""
    calls = []

    def fatal(_):
        calls.append("fatal")
        raise RuntimeError("an illegal memory access was encountered")

    contestants = {"napkinmath": sleepy(0.001), "bad": fatal, "peer": sleepy(0.001)}
    case = Case("op", "1", lambda: None, contestants, 1)
    monkeypatch.setattr(timing, "is_lost", lambda _: True)
    for _ in range(2):
        rows = Rows(tmp_path / "rows.jsonl", {})
        clock = Clock(torch.device("cpu"), 5.0)
        try:
            run_case(case, clock, rows, {"copy_bytes_per_s": 1e9}, 0.05)
        except ContextLost as error:
            assert "op, bad" in str(error)
        rows.close()
    assert calls == ["fatal"]
    measured = {row["contestant"] for row in rows.rows if row["status"] == "measured"}
    assert measured == {"napkinmath", "peer"}
    assert [row["contestant"] for row in rows.rows if row["status"] == LOST] == ["bad"]


def test_a_lost_context_starts_the_rest_anew(tmp_path, monkeypatch):
    def lost(*_):
        raise ContextLost("rope, liger")

    started = []
    monkeypatch.setattr(kernel_speed, "run_case", lost)
    monkeypatch.setattr(kernel_speed.correctness, "check", lambda *_: True)
    monkeypatch.setattr(kernel_speed, "MAKERS", (kernel_speed.elementwise.cases,))
    monkeypatch.setattr(
        kernel_speed, "go_on_anew", lambda _options, _left, reason: started.append(reason) or 0
    )
    command = ["--device", "cpu", "--budget", "600", "--only", "rope", "--out", str(tmp_path)]
    assert kernel_speed.main(command) == 0 and started == ["rope, liger"]


def test_each_contestant_has_inputs_of_its_own(tmp_path):
    """Liger writes into its gradient and into what it saved; the next one must not see that."""
    seen = {"napkinmath": [], "peer": []}

    def spoil(name):
        def call(x):
            seen[name].append(x[0].item())
            x.zero_()

        return call

    case = Case("op", "1", lambda: torch.rand(1), {name: spoil(name) for name in seen}, 1)
    rows_of(tmp_path, case)
    first = {name: [value for value in values if value][:4] for name, values in seen.items()}
    assert first["napkinmath"] == first["peer"] and len(first["peer"]) == 4


def test_a_copy_of_any_size_has_aligned_buffers():
    """Between addresses that are no multiples of 4 an H200 copied at a fifth of its bandwidth."""
    case = Case("op", "1", lambda: None, {}, 1, traffic_bytes=2 * 1_000_002)
    for pair in case.inputs_of(COPY, torch.device("cpu")):
        first, second = (buffer.data_ptr() for buffer in pair)
        assert (second - first) % 256 == 0 and pair[0].numel() >= 1_000_002


def test_unsloths_algorithm_gives_what_ours_gives():
    """Re-created from its equations: the same gradients as PEFT's layer, to bf16's rounding."""
    pytest.importorskip("bitsandbytes")
    case, _ = quantized.qlora_cases(torch.device("cpu"), True)
    inputs = case.make_inputs()
    ours, *others = (case.contestants[name](inputs) for name in sorted(case.contestants))
    assert len(others) == 2
    for other in others:
        for got, expected in zip(other, ours, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.02)


def test_a_small_qlora_linear_is_timed_as_a_graph_too():
    """From Python its launches take longer than the GPU does."""
    eager, graphed = quantized.qlora_cases(torch.device("cpu"), True)
    assert not eager.graphed and graphed.graphed and eager.contestants is graphed.contestants
    tokens = [aim.shape for aim in kernel_speed.goals.aims() if aim.op == graphed.op]
    assert [shape.split()[0] for shape in tokens] == ["2048", "512"]


def test_small_operations_are_timed_ten_to_a_graph(monkeypatch):
    """On a pretended GPU: one graph with every set in it, its time divided by the calls."""
    calls = []
    clock = Clock(torch.device("cuda"), 5.0)
    monkeypatch.setattr(clock, "time_calls", lambda call, graphs, _: [len(calls) * 2.0])
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    assert clock.time_graph(calls.append, [1, 2, 3], 0.1) == [2.0 * 11 / 10]
    assert calls == [1, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]  # one to warm up, ten in the graph
