"""The table of goals in docs/kernels.md: what is written is what the code says, and
a result changes it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "kernels"))
import kernel_table  # noqa: E402
from kernel_rows import attention, elementwise, experts, loss, quantized, tiles  # noqa: E402
from kernel_rows.goals import aims, floor_seconds, step_goals, step_op  # noqa: E402
from predicted import fractions, issue_seconds  # noqa: E402


def goal_row(op, shape, against, value, device="H200", **more):
    return json.dumps(
        {
            "op": op,
            "shape": shape,
            "against": against,
            "contestant": "goal",
            "value": value,
            "device": device,
            **more,
        }
    )


def written(tmp_path, *rows):
    path = tmp_path / "kernels.jsonl"
    path.write_text("\n".join(rows))
    return kernel_table.table_of([path])


def test_the_page_has_the_table_of_today():
    text = kernel_table.PAGE.read_text(encoding="utf-8")
    table = kernel_table.table_of(kernel_table.recorded())
    assert kernel_table.with_table(text, table) == text, (
        "run python benchmarks/kernels/kernel_table.py"
    )


def test_every_goal_is_not_measured_until_a_gpu_has_run(tmp_path):
    trial = goal_row("nf4 dequantize", "4096x4096", "copy", 0.9, trial=True)
    lines = written(tmp_path, trial).splitlines()[len(kernel_table.HEADS) :]
    assert lines and all(line.endswith("| not measured |") for line in lines)
    assert sum(" us | " in line for line in lines) >= len(lines) - 6, "floors are missing"


def test_a_result_is_shown_with_its_device_and_verdict(tmp_path):
    goals = [("4096x4096", 0.9), ("11008x4096", 0.8), ("11008x4096", 0.7)]
    table = written(
        tmp_path, *(goal_row("nf4 dequantize", shape, "copy", value) for shape, value in goals)
    )
    assert re.search(
        r"0.75 of copy bandwidth \| 9.82 us \| [0-9. to]+ \| 0.900 \(met, H200\) \|", table
    )
    assert "0.700 (missed, H200)" in table and "0.800" not in table, "the worst of a size"


def test_of_a_share_of_memory_the_largest_is_the_worst(tmp_path):
    against = next(name for name in step_goals() if name.startswith("memory:"))
    rows = [goal_row(step_op(), "8192 tokens", against, value) for value in (0.4, 0.6, 0.5)]
    table = written(tmp_path, *rows)
    assert "0.600 (missed, H200)" in table and "0.400" not in table


def test_the_benchmark_has_a_row_for_every_aim(monkeypatch):
    """Made on meta tensors: the names under which a GPU's rows will be looked up, without the
    gigabytes behind them."""
    import torch

    monkeypatch.setattr(quantized, "version_of", lambda package: None)
    makers = (
        quantized.dequantize_cases,
        quantized.qlora_cases,
        loss.cases,
        attention.cases,
        elementwise.cases,
        experts.cases,
        tiles.cases,
    )
    cases = [case for make in makers for case in make(torch.device("meta"), False)]
    made = {(case.op, case.shape): case.goals.keys() for case in cases}
    wanted = {(aim.op, aim.shape): aim.goals.keys() for aim in aims() if aim.op != step_op()}
    assert made.keys() == wanted.keys()
    assert all(
        made[key] <= wanted[key] and wanted[key] - made[key] <= {"flash-attn"} for key in made
    )


def test_floors_are_those_of_the_design():
    """An NF4 weight of 11008 x 4096: 0.516 bytes a value in, 2 out, at 4.3 TB/s; a causal head of
    128 over 2 x 8,192 tokens at 790 TFLOP/s."""
    floors = {(aim.op, aim.shape): aim.floor_s for aim in aims()}
    assert floors["nf4 dequantize", "11008x4096"] == pytest.approx(
        11008 * 4096 * 2.515869 / 4.3e12, rel=1e-4
    )
    assert floors["attention forward", "2x8192 32/8 heads of 128"] == pytest.approx(
        2 * 32 * 4 * 8192**2 * 128 / 2 / 790e12
    )
    assert floor_seconds(43, 0) == pytest.approx(1e-11)


def test_a_page_without_the_marks_is_an_error():
    with pytest.raises(ValueError, match="no table between"):
        kernel_table.with_table("a page", "a table")


def test_the_predicted_share_is_of_instructions_that_are_issued(tmp_path):
    """An hour of floor hides every instruction; with as many again, half of it is left."""
    sizes = [(aim.op, aim.shape) for aim in aims()]
    hidden = fractions(kernel_table.GATE, dict.fromkeys(sizes, 3600.0))
    assert set(hidden.values()) == {"1.00 to 1.00"}
    assert {op for op, _ in hidden} >= {"rope", "rms_norm fwd+bwd", "attention forward"}
    row = {"loop_instructions": "120", "loop_skipped": "20", "instructions": "900"}
    straight = {**row, "loop_instructions": "0", "loop_skipped": "0"}
    turns, once = (issue_seconds([("k", 10.0)], {"k": r}) for r in (row, straight))
    assert once / turns == pytest.approx(9.0)
