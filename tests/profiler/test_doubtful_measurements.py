"""What scatters or contradicts the datasheet is not saved, and no calibration with such speeds is
used."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.calibration.calibration import cache_path, read_calibration
from napkinmath.calibration.measured_layers import (
    LayerPoint,
    Linear,
    MeasuredLayers,
    layers_key,
    to_json,
)
from napkinmath.calibration.plausible import MOST_RATIO, contradictions
from napkinmath.catalog.gpus import find_gpu
from napkinmath.cli.main import main
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import estimate
from napkinmath.timing.efficiency import Efficiency, default_efficiency
from napkinmath_profiler.calibration import op_cases, op_points, steady, timing
from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.devices import choose_device
from napkinmath_profiler.calibration.op_points import OpPoint, steady_point
from napkinmath_profiler.calibration.steady import refuse_doubtful, unsteady
from napkinmath_profiler.calibration.timing import Timing

H100 = find_gpu("H100")
COPY, GEMM = op_cases.copy(1 << 20), op_cases.gemm(64, 64, 64, "bf16")
START = op_cases.launches(graphed=False)
MODEL = ("--model", "tinyllama", "--gpu", "H100", "--ctx", "512")


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_SPREAD", 0.20)


def samples(spread: float, count: int = 41) -> Timing:
    """Repetitions of about a second whose percentiles lie so far apart."""
    return Timing(tuple(1.0 + spread * (i % count - count // 2) / (0.8 * count) for i in range(41)))


@pytest.mark.parametrize(("spread", "kept"), [(0.0, True), (0.15, True), (0.3, False), (2, False)])
def test_what_scatters_has_no_time(spread: float, kept: bool) -> None:
    point = steady_point(COPY, samples(spread))
    assert (point.timing is not None) == kept
    assert kept or ("scattered" in point.reason and point.scattered > 0.2)
    assert ("median_s" in point.as_row()) == kept


@pytest.mark.parametrize(
    ("steady_ones", "scattering", "words"),
    [
        ([COPY, GEMM], [], ""),
        ([COPY, GEMM, START], [START], ""),
        ([GEMM], [COPY], "no copy repeats its time"),
        ([COPY, START], [GEMM], "no gemm repeats its time"),
        ([COPY, GEMM], [START] * 3, "3 of 5 operations scatter"),
    ],
)
def test_too_much_scatter_is_not_saved(
    steady_ones: list[Any], scattering: list[Any], words: str
) -> None:
    points = [steady_point(case, samples(0.0)) for case in steady_ones]
    points += [steady_point(case, samples(0.5)) for case in scattering]
    assert words in "; ".join(unsteady(points)) and bool(unsteady(points)) == bool(words)


def test_the_operation_that_is_named_is_of_the_kind_that_scatters() -> None:
    points = [steady_point(COPY, samples(0.5)), steady_point(START, samples(2.0))]
    (said,) = unsteady([*points, steady_point(GEMM, samples(0.0))])
    assert f"no copy repeats its time: copy {COPY.label} scattered" in said


def scaled(**factors: float) -> Efficiency:
    """An H100's speeds with some of them off by a factor."""
    speed = default_efficiency(H100)
    if "bf16" in factors:
        rates = {**dict(speed.matmul_flops_per_s)}
        rates["bf16"] *= factors.pop("bf16")
        speed = speed.replace(matmul_flops_per_s=tuple(rates.items()))
    return speed.replace(**{name: getattr(speed, name) * by for name, by in factors.items()})


@pytest.mark.parametrize("name", ["bf16", "stream_bytes_per_s", "pinned_bytes_per_s"])
@pytest.mark.parametrize("factor", [1 / 25, 1 / 3.2, 1 / 2.8, 1.0, 2.8, 3.2, 25])
def test_a_datasheet_rules_speeds_out_in_both_directions(name: str, factor: float) -> None:
    found = contradictions(scaled(**{name: factor}), H100)
    slower_slot = name == "pinned_bytes_per_s" and factor < 1
    assert bool(found) == (not 1 / MOST_RATIO <= factor <= MOST_RATIO and not slower_slot)
    assert all("H100" in said and "datasheet" in said for said in found)


def test_the_refusal_says_what_is_likely_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    device = choose_device("cpu")
    points = [steady_point(COPY, samples(0.0)), steady_point(GEMM, samples(0.0))]
    refuse_doubtful(points, scaled(), H100, device, what="it is not saved")
    for load, words in ((60.0, "keep 59.0 of the processor's"), (0.0, "nvidia-smi")):
        monkeypatch.setattr(steady.os, "getloadavg", lambda load=load: (load, load, load))
        with pytest.raises(InputError, match=r"it is not saved: bf16 products run at") as caught:
            refuse_doubtful(points, scaled(bf16=0.01), H100, device, what="it is not saved")
        assert words in str(caught.value) and "idle machine" in str(caught.value)


def calibration(path: Path, rates: dict[str, Any]) -> str:
    content = {"napkinmath_calibration": 2, "gpu": H100.name, "stamp": {}, "rates": rates}
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    "rates",
    [
        {"matmul_flops_per_s": {"bf16": 2e16}},
        {"matmul_flops_per_s": {"bf16": 1e12}},
        {"stream_bytes_per_s": 3e13},
        {"stream_bytes_per_s": 1e10},
        {"pinned_bytes_per_s": 1e12},
    ],
)
def test_a_file_with_such_speeds_is_not_used(
    tmp_path: Path, rates: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = calibration(tmp_path / "c.json", rates)
    for more in ([], ["--allow-stale-calibration"]):
        assert main([*MODEL, "--calibration", path, *more]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("estimate: ")]
        assert "datasheet of H100" in line and "estimate calibrate" in line
    with pytest.raises(InputError, match="datasheet"):
        read_calibration(path, H100, allow_stale=True)


def test_such_a_file_in_the_cache_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(cache_path(H100.name))
    path.parent.mkdir(parents=True)
    calibration(path, {"matmul_flops_per_s": {"bf16": 2e16}})
    assert main(MODEL) == 0
    found = capsys.readouterr()
    assert "uncalibrated" in found.out and "was not used" in found.err and "datasheet" in found.err
    assert main(["calibration", "show"]) == 0 and "STALE" in capsys.readouterr().out


def test_no_factor_of_measured_layers_makes_an_impossible_mfu(tmp_path: Path) -> None:
    """A processor has no datasheet: the layers of a file, however short, give no time above its
    peak."""
    train = TrainConfig(sequence_length=512)
    priced = estimate("tinyllama", train, hardware="H100")
    key = layers_key(priced.spec, priced.config, priced.step.update.optimizer.name)
    for factor in (1.0, 1e-2, 1e-5):
        seconds = Linear(intercept=0.0, slopes=(2e-3 * factor,))
        point = LayerPoint(
            micro_batch_size=1,
            sequence_length=512,
            seconds=(("forward", seconds), ("backward", seconds), ("optimizer step", seconds)),
            num_runs=2,
        )
        layers = MeasuredLayers(
            key=key,
            model="tinyllama",
            what="full",
            order=(0,) * 22,
            points=(point,),
        )
        path = Path(calibration(tmp_path / "c.json", {}))
        path.write_text(json.dumps({**json.loads(path.read_text()), "layers": [to_json(layers)]}))
        e = estimate("tinyllama", train, hardware="H100", calibration=str(path))
        assert e.measured_layers is not None
        assert e.time is None or 0 < e.time.mfu <= 1
        assert (e.time is None) == bool(e.withheld)
    assert e.withheld and math.isfinite(e.memory.device.value)


def test_what_is_no_calibration_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    command = ["calibrate", "--device", "cpu", "--budget", "1", "--out"]
    assert main([*command, str(tmp_path / "notes.txt")]) == 2
    assert "is no calibration" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_scattering_operation_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out, not tried again: the seconds are those that were given."""
    asked: list[float] = []

    def time_calls(*_: object, seconds: float) -> Timing:
        asked.append(seconds)
        return samples(0.9)

    monkeypatch.setattr(op_points, "time_calls", time_calls)
    point = op_points.measure_op(COPY, choose_device("cpu"), Allowance(1 << 30, 60.0))
    assert point == OpPoint(COPY, None, point.reason, point.scattered) and len(asked) == 1
