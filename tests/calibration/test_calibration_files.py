"""Calibration files: written whole or not at all, used and said, refused when stale, shown,
compared, removed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from napkinmath import Precision, TrainConfig
from napkinmath.base.errors import InputError
from napkinmath.calibration import local_machine
from napkinmath.calibration.calibration import (
    cache_path,
    load_calibration,
    read_calibration,
    staleness,
)
from napkinmath.calibration.measured_layers import (
    KindStretches,
    LayerMemory,
    LayerPoint,
    Linear,
    MeasuredLayers,
    Stretch,
    Turn,
    layer_order,
    layers_key,
    to_json,
)
from napkinmath.catalog.gpus import find_gpu, find_hardware
from napkinmath.cli.main import main
from napkinmath.estimate import estimate
from napkinmath.report.json_report import as_mapping
from napkinmath.serving import answers
from napkinmath.serving.plans import planned
from napkinmath_profiler.calibration import store

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tinyllama-1.1b"
TRAIN = TrainConfig(micro_batch_size=2, sequence_length=1024, precision=Precision.BF16)
ARGUMENTS = ["--model", MODEL, "--gpu", "H100", "--bs", "2", "--ctx", "1024", "--precision", "bf16"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def flat(value: float) -> Linear:
    return Linear(intercept=value, slopes=(0.0,))


def layers(
    scale: float = 1.0, points: tuple[tuple[int, int], ...] = ((2, 1024),)
) -> MeasuredLayers:
    """Layers of the model under test: forward 1 ms + 2 ms a layer, backward twice that, step 5
    ms."""
    step = estimate(MODEL, TRAIN, hardware="H100")
    seconds = (
        ("forward", Linear(intercept=1e-3 * scale, slopes=(2e-3 * scale,))),
        ("backward", Linear(intercept=2e-3 * scale, slopes=(4e-3 * scale,))),
        ("optimizer step", Linear(intercept=5e-3 * scale, slopes=(0.0,))),
    )
    first, between, last = (
        Stretch(net=flat(net), high=flat(high))
        for net, high in ((5120, 7680), (10240, 15360), (2560, 51200))
    )
    memory = LayerMemory(
        base=Linear(intercept=51200, slopes=(25600.0,)),
        turns=(
            Turn(
                step=0,
                phase="forward",
                layers=(KindStretches(first=first, between=between, last=last),),
            ),
        ),
    )
    return MeasuredLayers(
        key=layers_key(step.spec, step.config, step.step.update.optimizer.name),
        model=MODEL,
        what="full, bf16",
        order=(0,) * 22,
        points=tuple(
            LayerPoint(
                micro_batch_size=b, sequence_length=s, seconds=seconds, memory=memory, num_runs=3
            )
            for b, s in points
        ),
    )


def content(**changes: Any) -> dict[str, Any]:
    return {
        "napkinmath_calibration": 2,
        "gpu": "H100",
        "stamp": {"date": "2026-11-20T10:00:00Z", "torch": local_machine.torch_version()},
        "rates": {"stream_bytes_per_s": 2.0e12},
        "layers": [],
        **changes,
    }


def written(path: Path, **changes: Any) -> str:
    store.save(content(**changes), str(path))
    return str(path)


# ---------------------------------------------------------------- writing


def test_a_saved_file_reads_back(tmp_path: Path) -> None:
    path = written(tmp_path / "deep" / "c.json", layers=[to_json(layers())])
    found = read_calibration(path, find_gpu("H100"))
    assert (
        found.layers == (layers(),)
        and dict(found.rates) == {"stream_bytes_per_s": 2.0e12}
        and found.date == "2026-11-20"
    )
    assert os.listdir(tmp_path / "deep") == ["c.json"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EROFS, "cannot be written"),
        (errno.EIO, "error"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, call: str
) -> None:
    path = tmp_path / "c.json"
    before = Path(written(path)).read_text()

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store.os, call, full)
    with pytest.raises(InputError, match=words):
        store.save(content(gpu="A100"), str(path))
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["c.json"]


def test_killed_in_the_middle_of_writing_leaves_the_old_file(tmp_path: Path) -> None:
    """A process is killed between its last byte and the rename; the old file stands, and the next
    save sweeps up."""
    path = tmp_path / "c.json"
    before = Path(written(path)).read_text()
    code = (
        "import os, sys, time\nfrom napkinmath_profiler.calibration import store\ndef"
        " stuck(handle):\n    print('writing', flush=True)\n    time.sleep(60)\nstore.os.fsync ="
        " stuck\nstore.save({'napkinmath_calibration': 1, 'gpu': 'A100'}, sys.argv[1])\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / folder) for folder in ("estimator", "profiler", "kernels")
        ),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stdout.readline().strip() == b"writing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.read_text() == before
    assert len(os.listdir(tmp_path)) == 2
    written(path)
    assert os.listdir(tmp_path) == ["c.json"]


def test_layers_of_other_models_are_kept(tmp_path: Path) -> None:
    other = {**to_json(layers()), "key": "another"}
    path = written(tmp_path / "c.json", layers=[other, to_json(layers(scale=3.0))])
    merged = store.merged_layers(content(layers=[to_json(layers())]), path)
    assert [found["key"] for found in merged["layers"]] == [layers().key, "another"]
    assert merged["layers"][0] == to_json(layers())
    moved = content(layers=[to_json(layers())], stamp={"torch": "1.0"})
    assert store.merged_layers(moved, path) == moved
    assert store.merged_layers(moved, str(tmp_path / "none.json")) == moved


# ---------------------------------------------------------------- using


def test_a_step_takes_what_its_measured_layers_say(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    e = estimate(MODEL, TRAIN, hardware="H100", calibration=path)
    assert e.measured_layers is not None and e.time is not None
    phases = {phase.phase.value: phase.seconds for phase in e.time.phases}
    assert phases["forward"] == pytest.approx(1e-3 + 22 * 2e-3)
    assert phases["backward"] == pytest.approx(2e-3 + 22 * 4e-3)
    assert phases["optimizer step"] == pytest.approx(5e-3)
    assert e.time.seconds == pytest.approx(sum(phases.values()))


def test_sweeps_and_plans_take_measured_layers_too(capsys: pytest.CaptureFixture[str]) -> None:
    written(Path(cache_path("H100-SXM5-80GB")), layers=[to_json(layers())])
    knobs = ["--full", "--checkpointing", "none", "--optimizer", "adamw", "--loss", "hf"]
    words = [*ARGUMENTS, *knobs, "--kernels", "hf", "--no-optimizer-in-backward", "--json"]

    def answer(*command: str) -> Any:
        assert main([*command, *words]) == 0
        return json.loads(capsys.readouterr().out)

    measured = answer()["time"]["tokens_per_s"]
    (row,) = answer("plan")["best"]
    assert row["tokens_per_s"] == measured
    assert answer("sweep")[0]["tokens_per_s"] == pytest.approx(measured)
    asked = {"model": MODEL, "gpu": "H100", "bs": "2", "ctx": "1024", "precision": "bf16"}
    page = planned({**asked, "checkpointing": "none", "optimizer": "adamw", "loss": "hf"})
    for row in page["best"]:
        report = answers.answer({"model": MODEL, "gpu": "H100", **row["options"]})["report"]
        assert row["tokens_per_s"] == report["time"]["tokens_per_s"]


def test_fewer_layers_take_less(tmp_path: Path) -> None:
    from napkinmath.catalog.models import find_row

    row = find_row(MODEL)
    assert row is not None
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    short = estimate(
        {**row["config"], "num_hidden_layers": 5}, TRAIN, hardware="H100", calibration=path
    )
    assert short.measured_layers is not None and short.time is not None
    assert {p.phase.value: p.seconds for p in short.time.phases}["forward"] == pytest.approx(
        1e-3 + 5 * 2e-3
    )


def test_micro_steps_repeat_forward_and_backward_only(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    e = estimate(
        MODEL, TRAIN.replace(gradient_accumulation_steps=4), hardware="H100", calibration=path
    )
    assert e.time is not None
    phases = {phase.phase.value: phase.seconds for phase in e.time.phases}
    # The device's or the host's share of a phase can win differently with four micro-steps: within
    # a percent of four times one.
    assert phases["forward"] == pytest.approx(4 * (1e-3 + 22 * 2e-3), rel=0.01)
    assert phases["optimizer step"] == pytest.approx(5e-3, rel=0.01)


def test_between_points_the_priced_curve_is_scaled(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", layers=[to_json(layers(points=((2, 1024), (2, 4096))))])
    found = estimate(MODEL, TRAIN.replace(sequence_length=2048), hardware="H100", calibration=path)
    assert (
        found.time is not None
        and found.priced_time is not None
        and found.measured_layers is not None
    )
    ratios = []
    for length in (1024, 4096):
        at = estimate(
            MODEL, TRAIN.replace(sequence_length=length), hardware="H100", calibration=path
        )
        assert at.time is not None and at.priced_time is not None
        ratios.append(at.time.phases[0].seconds / at.priced_time.phases[0].seconds)
    ratio = found.time.phases[0].seconds / found.priced_time.phases[0].seconds
    assert min(ratios) < ratio < max(ratios)


@pytest.mark.parametrize(
    "changes", [{"precision": Precision.FP16}, {"optimizer": "adamw-8bit"}, {"attention": "eager"}]
)
def test_another_training_step_takes_the_rates_alone(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    from napkinmath import Attention

    if "attention" in changes:
        changes = {"attention": Attention.EAGER}
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    e = estimate(MODEL, TRAIN.replace(**changes), hardware="H100", calibration=path)
    assert e.measured_layers is None and e.time is e.priced_time


def test_the_default_optimizer_named_is_the_default() -> None:
    named = estimate(MODEL, TRAIN.replace(optimizer="adamw-fused"), hardware="H100")
    assert layers_key(named.spec, named.config, named.step.update.optimizer.name) == layers().key


def test_memory_is_laid_end_to_end() -> None:
    memory = layers().points[0].memory
    assert memory is not None
    assert memory.phase_peaks((0,) * 4) == {"forward": 512 * (100 + 4 * 50 + 10 + 2 * 20 + 100)}
    assert memory.phase_peaks((0, 0)) == {"forward": 512 * (100 + 2 * 50 + 10 + 100)}


def test_measured_memory_is_told_at_the_measured_point_only(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    measured = estimate(MODEL, TRAIN, hardware="H100", calibration=path)
    assert measured.measured_peaks == {"forward": 512 * (100 + 22 * 50 + 10 + 20 * 20 + 100)}
    longer = TRAIN.replace(sequence_length=512)
    assert estimate(MODEL, longer, hardware="H100", calibration=path).measured_peaks == {}


def test_kinds_of_layers_are_numbered_as_they_come() -> None:
    assert layer_order(estimate("gemma-3-1b").spec)[:13] == (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0)


# ---------------------------------------------------------------- saying so


@pytest.mark.slow
def test_the_cache_is_used_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    assert "uncalibrated" in capsys.readouterr().out
    store.save(content(gpu=find_gpu("H100").name), cache_path(find_gpu("H100").name))
    assert main(ARGUMENTS) == 0
    text = capsys.readouterr().out
    assert "calibrated 2026-11-20" in text and "uncalibrated" not in text


@pytest.mark.slow
def test_measured_layers_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    assert main([*ARGUMENTS, "--calibration", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "calibrated 2026-11-20 on real layers of this model" in text
        and "requested in the forward, by real layers" in text
    )
    assert main([*ARGUMENTS, "--calibration", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["time"]["calibration"]
    assert told["path"] == path and told["measured_layers"] is True


def test_json_says_null_without() -> None:
    assert as_mapping(estimate(MODEL, TRAIN, hardware="H100"))["time"]["calibration"] is None


@pytest.mark.slow
def test_a_file_alone_names_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {
        "kind": "cpu",
        "vendor": "cpu",
        "memory_bytes": 64 << 30,
        "bandwidth_bytes_per_s": 4e10,
        "dense_flops": {"fp32": 1e11, "bf16": 2e11, "fp16": 2e11, "tf32": 1e11},
        "num_sms": 2,
        "hz": 2e9,
        "l2_bytes": 1 << 25,
        "host_bytes_per_s": 2e10,
    }
    path = written(tmp_path / "cpu.json", gpu="CPU Z80, 2 threads", device=device, rates={})
    assert main(["--model", MODEL, "--precision", "fp32", "--calibration", path]) == 0
    text = capsys.readouterr().out
    assert "CPU Z80, 2 threads" in text and "calibrated" in text and "device context" not in text
    assert main(["--model", MODEL, "--precision", "fp32", "--calibration", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for given in (path, load_calibration(path)):
        found = estimate(MODEL, TrainConfig(precision=Precision.FP32), calibration=given)
        assert (
            found.hardware is not None
            and found.hardware.gpu.name == "CPU Z80, 2 threads"
            and found.time is not None
        )
        assert (
            found.time.seconds == told["time"]["seconds"]
            and found.memory.device.value == told["memory"]["device"]["value"]
        )
    assert (
        estimate(MODEL, calibration=written(tmp_path / "h100.json")).hardware
        == estimate(MODEL, hardware="H100").hardware
    )


# ---------------------------------------------------------------- stale


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100 and a driver."""
    monkeypatch.setattr(local_machine, "gpu_names", lambda: ("NVIDIA H100 80GB HBM3",))
    monkeypatch.setattr(local_machine, "driver_version", lambda: "570.86.15")


OLD = {"torch": {"torch": "1.13.1+cu117"}, "driver": {"driver": "470.57.02"}}


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_machine")
@pytest.mark.parametrize("what", sorted(OLD))
def test_a_stale_file_is_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = written(tmp_path / "c.json", stamp=OLD[what])
    assert main([*ARGUMENTS, "--calibration", path]) == 2
    said = capsys.readouterr().err
    assert "stale" in said and OLD[what][what] in said and "--allow-stale-calibration" in said
    assert main([*ARGUMENTS, "--calibration", path, "--allow-stale-calibration"]) == 0
    assert "calibrated" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_machine")
def test_a_stale_one_in_the_cache_is_named_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    path = cache_path(find_gpu("H100").name)
    store.save(content(gpu=find_gpu("H100").name, stamp=OLD["driver"]), path)
    assert main(ARGUMENTS) == 0
    captured = capsys.readouterr()
    assert "uncalibrated" in captured.out
    assert path in captured.err and "driver was 470.57.02 and is 570.86.15" in captured.err
    assert main([*ARGUMENTS, "--allow-stale-calibration"]) == 0
    assert "uncalibrated" not in capsys.readouterr().out


def test_another_gpu_is_refused_unless_allowed(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json")
    with pytest.raises(InputError, match=r"of GPU 'H100', not of A100"):
        read_calibration(path, find_gpu("A100-80"))
    assert read_calibration(path, find_gpu("A100-80"), allow_stale=True).gpu == "H100"


def test_a_mig_slice_is_another_gpu(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json")
    with pytest.raises(InputError, match=r"MIG 3g\.40gb"):
        read_calibration(path, find_hardware("H100 MIG 3g.40gb").gpu)
    own = written(tmp_path / "mig.json", gpu="NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert (
        read_calibration(own, find_hardware("H100 MIG 3g.40gb").gpu)
        .efficiency(find_gpu("H100"))
        .stream_bytes_per_s
        == 2.0e12
    )


def test_a_driver_is_not_compared_with_another_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file from the cluster, read on a laptop whose GPU and driver are others."""
    monkeypatch.setattr(local_machine, "gpu_names", lambda: ("NVIDIA GeForce RTX 4090",))
    monkeypatch.setattr(local_machine, "driver_version", lambda: "999.1")
    path = written(tmp_path / "c.json", stamp={"driver": "470.57.02"})
    assert staleness(load_calibration(path), find_gpu("H100")) == ()


def test_a_hosts_pace_of_version_1_is_stale_and_left_out(tmp_path: Path) -> None:
    """It held the work of whole layers, which is priced apart since: steps came out up to 2.2 times
    too long."""
    rates = {"stream_bytes_per_s": 2.0e12, "dispatch_forward_s": 4e-5}
    path = written(tmp_path / "c.json", napkinmath_calibration=1, rates=rates)
    assert any(
        "older version" in why for why in staleness(load_calibration(path), find_gpu("H100"))
    )
    with pytest.raises(InputError, match="older version"):
        read_calibration(path, find_gpu("H100"))
    found = read_calibration(path, find_gpu("H100"), allow_stale=True)
    assert dict(found.rates) == {"stream_bytes_per_s": 2.0e12}
    whole = written(tmp_path / "d.json", napkinmath_calibration=1)
    assert read_calibration(whole, find_gpu("H100")).rates == (("stream_bytes_per_s", 2.0e12),)


@pytest.mark.torch
def test_the_driver_is_read_where_the_kernel_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build "
        " (x@y)\nGCC version: gcc version 12.3.0\n"
    )
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\n"
    )
    monkeypatch.setattr(local_machine, "DRIVER_FILE", str(version))
    monkeypatch.setattr(local_machine, "GPU_FOLDER", str(tmp_path / "gpus"))
    assert local_machine.driver_version() == "570.86.15"
    assert local_machine.gpu_names() == ("NVIDIA H100 80GB HBM3",)
    import torch

    assert local_machine.torch_version() == torch.__version__


@pytest.mark.parametrize(
    ("broken", "quoted"),
    [
        (
            {"layers": [{"key": "k", "model": "m", "what": "w", "order": [0, 2], "points": []}]},
            "order",
        ),
        (
            {
                "layers": [
                    {
                        "key": "k",
                        "model": "m",
                        "what": "w",
                        "order": [0],
                        "points": [{"micro_batch_size": 0}],
                    }
                ]
            },
            "seconds",
        ),
        (
            {"layers": [{"key": "k", "model": "m", "what": "w", "order": [0], "points": 3}]},
            "points",
        ),
        ({"layers": 3}, "layers"),
        ({"rates": {"attention": {"flash9": {}}}}, "flash9"),
        ({"rates": {"attention": {"flash": {"warp": 1}}}}, "warp"),
        ({"gpu": 3}, "3"),
        ({"stamp": []}, "stamp"),
        ({"rates": {"stream_bytes_per_s": None}}, "None"),
    ],
)
def test_broken_files_are_quoted(tmp_path: Path, broken: dict[str, Any], quoted: str) -> None:
    path = written(tmp_path / "c.json", **broken)
    with pytest.raises(InputError, match=quoted):
        read_calibration(path, find_gpu("H100"))


def test_a_point_whose_fit_is_short_is_refused(tmp_path: Path) -> None:
    found = to_json(layers())
    found["points"][0]["seconds"]["forward"] = [1.0]
    path = written(tmp_path / "c.json", layers=[found])
    with pytest.raises(InputError, match=r"forward.*intercept"):
        load_calibration(path)


# ---------------------------------------------------------------- estimate calibration


def run(*words: str) -> int:
    return main(["calibration", *words])


def test_show_lists_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show") == 0
    assert "no calibration in" in capsys.readouterr().out
    path = cache_path(find_gpu("H100").name)
    store.save(
        content(gpu=find_gpu("H100").name, layers=[to_json(layers())], notes=["the clock changed"]),
        path,
    )
    assert run() == 0
    assert "layers of tinyllama-1.1b" in capsys.readouterr().out
    assert run("show", "h100") == 0
    text = capsys.readouterr().out
    assert (
        "stream_bytes_per_s" in text
        and "note: the clock changed" in text
        and "2 x 1024   forward" in text
    )
    assert run("show", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == find_gpu("H100").name


def test_diff_tells_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.json", layers=[to_json(layers())])
    new = written(
        tmp_path / "new.json",
        rates={"stream_bytes_per_s": 1.5e12},
        stamp={"torch": "9.9"},
        layers=[to_json(layers(scale=2.0))],
    )
    assert run("diff", old, new) == 0
    text = capsys.readouterr().out
    assert (
        "stream_bytes_per_s: 2e+12 -> 1.5e+12 (-25.0%)" in text
        and "-> 9.9" in text
        and "forward: 45.0 ms -> 90.0 ms (+100.0%)" in text
    )
    assert run("diff", old, old) == 0
    assert "no difference" in capsys.readouterr().out


def test_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cache_path(find_gpu("H100").name)
    store.save(content(gpu=find_gpu("H100").name), path)
    precious = tmp_path / "thesis.json"
    precious.write_text("{}")
    assert run("remove", str(precious)) == 2 and precious.exists()
    assert run("remove") == 2
    assert run("remove", "H100") == 0 and not os.path.exists(path)
    assert run("remove", "H100") == 2
    store.save(content(), path)
    assert run("remove", "--all") == 0 and not os.path.exists(path)


@pytest.mark.parametrize(
    "words",
    [
        ("polish",),
        ("show", "a", "b"),
        ("diff", "one.json"),
        ("show", "no-such.json"),
        ("show", "H100"),
    ],
)
def test_what_is_not_understood(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_reading_a_calibration_loads_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", layers=[to_json(layers())])
    code = (
        f"import sys, napkinmath\nnapkinmath.estimate('{MODEL}', hardware='H100',"
        f" calibration={path!r}).time\nassert 'torch' not in sys.modules and 'numpy' not in"
        " sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "estimator")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flops", [1e6, 1e9, 1e12])
def test_a_device_however_slow_has_a_time(
    tmp_path: Path, flops: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A processor that others kept busy while it was measured may show less than one operation a
    cycle."""
    dense = dict.fromkeys(("fp32", "tf32", "fp16", "bf16"), flops)
    device = {
        "kind": "cpu",
        "vendor": "cpu",
        "memory_bytes": 64 << 30,
        "bandwidth_bytes_per_s": 1e9,
        "dense_flops": dense,
        "num_sms": 2,
        "hz": 2e9,
        "l2_bytes": 1 << 25,
        "host_bytes_per_s": 1e9,
    }
    path = written(tmp_path / "slow.json", gpu="CPU Z80, 2 threads", device=device, rates={})
    assert main(["--model", MODEL, "--precision", "fp32", "--calibration", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["seconds"] > 1e12 / flops


@pytest.mark.slow
def test_a_calibration_that_finds_no_place_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk of the place asked for is full after a minute of measuring: the file lies in the
    temporary folder, and the error says where."""
    from napkinmath_profiler.calibration import timing
    from napkinmath_profiler.cli import calibrate as calibrate_cli

    monkeypatch.setattr(timing, "MOST_SPREAD", float("inf"))  # however busy the machine is
    whole, full = calibrate_cli.save, tmp_path / "full"

    def save(content: dict[str, Any], path: str) -> None:
        if path.startswith(str(full)):
            raise InputError("calibration could not be written to 'full': the disk is full")
        whole(content, path)

    monkeypatch.setattr(calibrate_cli, "save", save)
    monkeypatch.setattr(
        calibrate_cli.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "temporary")
    )
    (tmp_path / "temporary").mkdir()
    assert (
        main(["calibrate", "--device", "cpu", "--budget", "1", "--out", str(full / "mine.json")])
        == 2
    )
    found = capsys.readouterr()
    kept = tmp_path / "temporary" / "mine.json"
    assert (
        "the disk is full; it is in" in found.err
        and str(kept) in found.err
        and "rates" in found.out
    )
    assert load_calibration(str(kept)).rates

    kept.unlink()
    monkeypatch.setattr(
        calibrate_cli, "save", lambda *_: (_ for _ in ()).throw(InputError("the disk is full"))
    )
    assert (
        main(["calibrate", "--device", "cpu", "--budget", "1", "--out", str(full / "mine.json")])
        == 2
    )
    assert not (tmp_path / "temporary").exists()
