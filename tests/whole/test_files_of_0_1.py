"""Files that version 0.1 wrote are read, or refused in one line that says the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.runs import run

FILES = Path(__file__).resolve().parents[1] / "files_of_0_1"


def test_a_calibration_is_read() -> None:
    path = FILES / "calibration.json"
    done = run("--model", "tinyllama", "--full", "--calibration", str(path), "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["hardware"]["gpu"].startswith("H100") and found["time"]["seconds"] > 0


@pytest.mark.torch
def test_a_snapshot_is_read() -> None:
    pytest.importorskip("torch")
    step = ("--arch", "L1 h32 a2 f64 v50", "--ctx", "16")
    done = run("compare", "analytic", str(FILES / "snapshot.pickle"), *step)
    assert done.code == 0, done.err
    assert "at the peak" in done.out


def test_a_batch_that_was_killed_is_refused(tmp_path: Path) -> None:
    """What it answered so far stays as it was."""
    (tmp_path / "jobs.jsonl").write_text('{"model": "llama-7b"}\n')
    out, state = tmp_path / "batch.jsonl", tmp_path / "batch.jsonl.state"
    out.write_text('{"answer": 1}\n')
    state.write_bytes((FILES / "batch.jsonl.state").read_bytes())
    done = run("batch", str(tmp_path / "jobs.jsonl"), "--out", str(out))
    assert done.code == 2 and done.err.count("\n") == 1 and "--force" in done.err
    assert out.read_text() == '{"answer": 1}\n'
