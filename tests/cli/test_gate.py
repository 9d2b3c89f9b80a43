"""check, doctor, completion: the gate's exit codes, what doctor says of a bare machine, what a
shell completes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.calibration import local_machine
from napkinmath.cli.completion import choices, flags_by_command
from napkinmath.cli.flags import SHARED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text("model: llama-7b\nmethod: qlora\nbs: 4\nctx: 2048\n")
    return str(file)


@pytest.mark.slow
def test_gate_has_the_exit_codes_of_the_estimate(job: str) -> None:
    assert run("check", job, "--gpu", "rtx4090").code == 0
    done = run("check", job, "--gpu", "rtx4090", "--gpu", "rtx3060-12")
    assert (
        done.code == 1
        and "does not fit" in done.out
        and re.search(r"; --\S.* saves [\d.]+ GiB$", done.out.strip())
        and len(done.out.splitlines()) == 2
    )
    codes = {run(job, "--vram", f"{mib}MiB").code: mib for mib in range(10_000, 18_000, 800)}
    assert set(codes) == {0, 1, 3}
    unsure = ("check", job, "--vram", f"{codes[3]}MiB")
    assert run(*unsure).code == 3 and run(*unsure, "--lenient").code == 0
    assert run("check", job).code == 2 and run("check", "no.yaml", "--gpu", "t4").code == 2


def test_gate_asks_for_headroom_and_takes_many_jobs(job: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(
        '{"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "bf16": true}'
    )
    done = run("check", job, str(other), "--gpu", "rtx4090", "--json")
    first, second = map(json.loads, done.out.splitlines())
    assert done.code == 0 and first["job"] == job and second["model"] == "gpt2"
    room = f"{(first['headroom_bytes'] >> 20) + 1}MiB"
    done = run("check", job, "--gpu", "rtx4090", "--min-headroom", room)
    assert done.code == 1 and "leaves less" in done.out


def test_gate_takes_the_gpus_of_the_machine(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        local_machine, "gpu_names", lambda: ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090")
    )
    done = run("check", job)
    assert (
        done.code == 0
        and len(done.out.splitlines()) == 1
        and "RTX 4090" in done.out
        and "this machine" in done.err
    )


def test_doctor_names_what_is_there_and_what_installs_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {row["what"]: row for row in json.loads(run("doctor", "--json").out)}
    assert found["Python"]["good"] and found["napkinmath"]["found"].startswith("0.")
    import numpy

    assert found["numpy"]["found"].startswith(numpy.__version__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    bare = {row["what"]: row for row in json.loads(run("doctor", "--json").out)}
    assert (
        not bare["torch"]["good"]
        and bare["torch"]["way_out"]
        == "pip install torch transformers peft accelerate bitsandbytes numpy rich"
    )


def test_doctor_knows_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        local_machine, "gpu_names", lambda: ("NVIDIA H100 80GB HBM3", "NVIDIA Banana 9000")
    )
    monkeypatch.setattr(local_machine, "driver_version", lambda: "570.86.15")
    done = run("doctor")
    assert (
        done.code == 0
        and "570.86.15" in done.out
        and "estimate calibrate" in done.out
        and "not in the catalog" in done.out
    )


def test_every_flag_of_the_tables_is_completed() -> None:
    flags = flags_by_command()
    for _, rows in SHARED:
        for row in rows:
            assert all(name in flags[""] for name in row[0]), row[0]
    assert {"plan", "sweep", "batch", "check", "doctor", "models", "gpus", "completion"} <= set(
        flags
    )
    assert {"--goal", "--max-bs", "--export", "--bs"} <= set(
        flags["plan"]
    ) and "--min-headroom" in flags["check"]
    assert set(choices()) <= {flag for found in flags.values() for flag in found}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(tmp_path: Path) -> None:
    tool = tmp_path / "estimate"
    tool.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT / "estimator"}" exec "{sys.executable}" -m napkinmath "$@"\n'
    )
    tool.chmod(0o755)

    def completed(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in ("estimate", *words))
        script = (
            f'eval "$(estimate completion bash)"; COMP_WORDS=({quoted}); COMP_CWORD={len(words)};'
            ' _estimate; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", "-c", script], env=environment, check=True, capture_output=True, text=True
        ).stdout.split()

    assert completed("pl") == ["plan"]
    assert completed("plan", "--go") == ["--goal"]
    assert completed("plan", "--goal", "f") == ["fewest-changes"]
    assert "llama-3.1-8b" in completed("--model", "llama-3.1")
    assert "--precision" in completed("--pre") and "bf16-amp" in completed("--precision", "bf16-")
    assert any("4090" in name for name in completed("check", "--gpu", "rtx-40"))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_flag(shell: str) -> None:
    text = run("completion", shell).out
    assert all(word in text for word in ("goal", "min-headroom", "grad-accum", "fewest-changes"))
    assert run("completion", "tcsh").code == 2
