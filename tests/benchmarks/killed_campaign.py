"""The campaign with each stage's work answered from a recorded run, and one stage killed.

A program, because a process that a test forks has the test runner's threads' locks and pipes:
``killed_campaign.py RECORDED OUT STAGE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import campaign
from campaign_parts.ledger import read_rows

#: Of each stage, what does its work.
WORK = {
    "ceilings": "ceilings",
    "calibration": "run_command",
    "watching": "watch_overhead",
    "steps": "measure_case",
    "predictions": "predict",
}


def recorded_work(recorded: Path, done: Counter[str]) -> dict[str, Callable[..., object]]:
    """Of each stage, its work as the run in the folder did it; `done` counts the calls."""
    steps = {row["case"]: row for row in read_rows(recorded / "steps.jsonl")}
    predictions = {row["case"]: row for row in read_rows(recorded / "predictions.jsonl")}

    def calibrated(command: list[str], *_: object) -> str:
        Path(command[command.index("--out") + 1]).write_text("{}")
        return "calibration: done"

    def counted(stage: str, answer: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **_: object) -> object:
            done[stage] += 1
            return answer(*arguments)

        return call

    answers: dict[str, Callable[..., object]] = {
        "ceilings": lambda *_: json.loads((recorded / "ceilings.json").read_text()),
        "calibration": calibrated,
        "watching": lambda *_: json.loads((recorded / "watch.json").read_text()),
        "steps": lambda case, *_: steps[case.name],
        "predictions": lambda row, *_: predictions[row["case"]],
    }
    return {stage: counted(stage, answer) for stage, answer in answers.items()}


def raising(error: Exception) -> Callable[..., None]:
    """Work that fails."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


def killed(*_: object, **__: object) -> None:
    """Work that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(recorded: str, out: str, stage: str) -> None:
    """Run the campaign until the stage's work kills it."""
    work = recorded_work(Path(recorded), Counter()) | {stage: killed}
    for each, answer in work.items():
        setattr(campaign, WORK[each], answer)
    campaign.main(["--dry-run", "--out", out])


if __name__ == "__main__":
    main(*sys.argv[1:])
