"""The recorded run of five newcomers' tasks is of the pages as they are, without a dead end."""

from __future__ import annotations

import json

from newcomers import ROOT, TASKS, block_after

RECORDED = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "newcomers.json").read_text())


def test_every_task_was_tried_with_the_pages_own_commands() -> None:
    """Run `make newcomers` where a page has changed."""
    *found, page = RECORDED["tasks"]
    assert [task["task"] for task in found] == [task.question for task in TASKS]
    for task, recorded in zip(TASKS, found, strict=True):
        language, text = block_after(task.page, task.after)
        said = text if language == "sh" else "python train.py"
        assert recorded["commands"] == said.strip().splitlines(), task.question
    assert f"{page['commands'][0].removesuffix('page')}DIR" in (ROOT / "README.md").read_text()


def test_no_task_was_a_dead_end() -> None:
    assert RECORDED["install_seconds"] > 0
    assert not [task for task in RECORDED["tasks"] if "dead_end" in task or "not_run" in task]


def test_other_pythons_were_tried_without_a_failure() -> None:
    """Run `make pythons`."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "pythons.json").read_text())
    assert {row["python"].rpartition(".")[0] for row in rows} >= {"3.10", "3.12", "3.13"}
    for row in rows:
        assert row["failed"] == [] and row["exit_code"] == 0
        assert row["tests"] - row["skipped"] > 5000
