"""`estimate measure` on a CPU: the report, its JSON, its files, and what it says when something is
wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.cli.main import main
from napkinmath_profiler.cli import measure as measure_cli
from napkinmath_profiler.measuring.partial import plan_layers
from napkinmath_profiler.snapshot.read_snapshot import read_snapshot
from napkinmath_profiler.trace import TraceOptions

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "architectures": ["LlamaForCausalLM"],
}
SHORT = ["--device", "cpu", "--bs", "2", "--ctx", "16", "--steps", "2"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def measured(model: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert measure_cli.run(["--model", model, *SHORT, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_measured_and_traced_agree_and_the_phases_are_timed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(model, "--lora", capsys=capsys)
    traced, real = found["sides"]["traced"], found["sides"]["measured"]
    assert {k: real[k] for k in ("requested", "allocated", "reserved", "phase_peaks")} == {
        k: traced[k] for k in ("requested", "allocated", "reserved", "phase_peaks")
    }
    assert set(found["phases"]) == {
        "forward",
        "loss",
        "backward",
        "gradient clipping",
        "optimizer step",
    }
    assert all(
        p["seconds"]["samples"] == 2
        and p["seconds"]["low"] <= p["seconds"]["median"] <= p["seconds"]["high"]
        for p in found["phases"].values()
    )
    assert found["tokens_per_s"] > 0 and found["layers"] == {"measured": 7, "total": 7}
    assert found["comparison"]["by_role"]["UNEXPLAINED"]["measured"] == 0
    assert abs(found["sides"]["analytic"]["requested"] / real["requested"] - 1) < 0.1


def test_a_few_layers_stand_for_all(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = (measured(model, *flags, capsys=capsys) for flags in ((), ("--layers", "6")))
    assert part["layers"] == {"measured": 6, "total": 7}
    assert part["sides"]["measured"]["phase_peaks"] == whole["sides"]["measured"]["phase_peaks"]
    assert set(part["sides"]["measured"]["seconds"]) == set(whole["sides"]["measured"]["seconds"])


def test_files_are_written_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, drawing = tmp_path / "s.pickle", tmp_path / "t.svg"
    flags = ["--snapshot", str(snapshot), "--timeline", str(drawing)]
    found = measured(model, *flags, capsys=capsys)
    assert read_snapshot(snapshot).timeline.peak().nbytes == found["sides"]["measured"]["requested"]
    assert drawing.read_text().startswith("<svg")
    with pytest.raises(InputError, match="exists; add --force"):
        measure_cli.run(["--model", model, *SHORT, *flags])


def test_the_screen_shows_what_was_predicted_and_measured(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure_cli.run(["--model", model, *SHORT, "--explain"]) == 0
    text = capsys.readouterr().out
    for word in (
        "traced",
        "analytic",
        "measured",
        "requested",
        "reserved",
        "backward",
        "milliseconds",
        "tokens/s",
        "UNEXPLAINED",
        "layers.*.mlp.up_proj",
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "abacus"], "unknown to PyTorch"),
        (["--layers", "8"], "use 1 to 7"),
        (["--memory-share", "2"], "out of range"),
        (["--precision", "fp8"], "precision fp8"),
        (["--offload", "optimizer"], "offloading"),
    ],
)
def test_what_cannot_be_measured_is_said(
    model: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert main(["measure", "--model", model, "--ctx", "16", *device, *flags]) == 2
    assert words in capsys.readouterr().err


def test_layers_are_chosen_by_what_fits() -> None:
    options = TraceOptions(dtype="fp32", micro_batch_size=1, sequence_length=8)
    whole = plan_layers(CONFIG, options, lambda _: True)
    assert whole.is_whole and whole.kept == tuple(range(7))
    repeating = plan_layers(CONFIG, options, lambda count: count <= 6)
    assert (
        not repeating.is_whole
        and repeating.kept == (0, 1, 2, 3, 5, 6)
        and len(repeating.slope) == 3
    )
    few = plan_layers(CONFIG, options, lambda count: count <= 2)
    assert few.kept == (0, 1) and few.slope == (0,)
    assert plan_layers(CONFIG, options, lambda _: False).kept == (0,)


@pytest.mark.parametrize("flags", [["--qlora"], ["--optimizer", "adamw-8bit"]])
@pytest.mark.parametrize("command", ["measure", "trace"])
def test_without_bitsandbytes_it_is_said_in_one_line(
    model: str,
    command: str,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    device = [] if command == "trace" else ["--device", "cpu"]
    assert main([command, "--model", model, "--ctx", "16", *device, *flags]) == 2
    said = capsys.readouterr().err
    assert (
        "needs bitsandbytes" in said
        and "pip install bitsandbytes" in said
        and "Traceback" not in said
    )
