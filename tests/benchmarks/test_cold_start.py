"""The gate of cold start: what it lets pass, what it refuses, and a baseline that says too little."""

from __future__ import annotations

import json
from pathlib import Path

import cold_start
import pytest
from cold_start import BARE, GATED, JSON, REPORT, TABLES, Timing

BEST = {
    BARE: Timing(0.01, 0.01, 8.0),
    "import napkinmath": Timing(0.011, 0.011, 8.0),
    TABLES: Timing(0.04, 0.04, 15.0),
    REPORT: Timing(0.06, 0.06, 15.0),
    JSON: Timing(0.06, 0.06, 15.0),
}


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    file = tmp_path / "cold_start.json"
    file.write_text(cold_start.written(BEST, {}, 1))
    return file


def gated(monkeypatch: pytest.MonkeyPatch, file: Path, *rounds: dict[str, Timing]) -> int:
    """The gate's exit code where `rounds` are measured one after the other, the last for good."""
    waiting = list(rounds)
    monkeypatch.setattr(cold_start, "reason_to_skip", lambda command: "")
    monkeypatch.setattr(
        cold_start, "measure", lambda *_: waiting.pop(0) if len(waiting) > 1 else waiting[0]
    )
    return cold_start.gate(file, 1)


def slower(name: str, share: float) -> dict[str, Timing]:
    return BEST | {name: BEST[name]._replace(processor_seconds=BEST[name][1] * (1 + share))}


@pytest.mark.parametrize(("share", "code"), [(0.0, 0), (0.04, 0), (-0.5, 0), (0.06, 1)])
@pytest.mark.parametrize("name", [REPORT, JSON, "import napkinmath"])
def test_more_than_five_per_cent_fail(monkeypatch, baseline, name, share, code) -> None:
    assert gated(monkeypatch, baseline, slower(name, share)) == code


def test_memory_is_gated(monkeypatch, baseline) -> None:
    grown = BEST | {REPORT: BEST[REPORT]._replace(peak_mib=16.0)}
    assert gated(monkeypatch, baseline, grown) == 1


def test_what_a_busy_machine_adds_is_measured_again(monkeypatch, baseline) -> None:
    assert gated(monkeypatch, baseline, slower(REPORT, 0.3), BEST) == 0


def test_a_ratio_that_was_not_measured_fails(monkeypatch, baseline) -> None:
    without = {name: timing for name, timing in BEST.items() if name != TABLES}
    assert gated(monkeypatch, baseline, without) == 1


def test_a_baseline_without_ratios_is_named(monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"commands": {}}))
    assert gated(monkeypatch, file, BEST) == 2
    assert str(GATED[0]) in capsys.readouterr().err
