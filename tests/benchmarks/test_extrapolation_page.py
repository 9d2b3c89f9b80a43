"""The page of the extrapolation's results is made from them, and what is in the repository is
current."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*/extrapolation.json"))
sys.path.append(str(ROOT / "benchmarks" / "accuracy"))

import extrapolation  # noqa: E402


@pytest.mark.parametrize("results", RESULTS, ids=lambda path: path.parent.name)
def test_the_page_is_that_of_the_results(results):
    found = json.loads(results.read_text())
    assert results.with_suffix(".md").read_text() == extrapolation.page(found, results.name)
    assert found["summary"] + "." == extrapolation.page(found, results.name).splitlines()[-1]


def test_a_case_that_failed_is_a_row_that_says_why(tmp_path):
    case = {
        "model": "llama",
        "way": "full",
        "layers": 2,
        "bytes": {"forward": [100, 98]},
        "seconds": {"forward": [2.0, 1.0]},
    }
    stamp = {
        "device": "Some GPU",
        "date": "2026-01-02T00:00:00Z",
        "torch": "2",
        "transformers": "5",
    }
    rows = [case, {"model": "gpt2", "way": "lora", "error": "out of memory"}]
    results = tmp_path / "found.json"
    results.write_text(json.dumps({"stamp": stamp, "rounds": 1, "rows": rows}))
    extrapolation.write_page(results)
    lines = (tmp_path / "found.md").read_text().splitlines()
    assert (
        "| llama | full | 2 | 2 | 2.000 |  |  | 2.000 |" in lines
        and "| gpt2 | lora | | out of memory | | | | |" in lines
    )
    assert "cuda:0" in lines[2] and lines[-1].startswith(
        "whole step over 1 cases: median error 100.0%"
    )
