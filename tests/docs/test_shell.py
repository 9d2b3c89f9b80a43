"""Tab completion in the shells that are here, and what `estimate doctor` says."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from napkinmath import __version__
from napkinmath.cli import doctor
from napkinmath.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def printed(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(arguments)) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def bash_script() -> str:
    return printed("completion", "bash")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `estimate` on the path, as installing makes one, in an empty folder."""
    file = tmp_path / "bin" / "estimate"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m napkinmath "$@"\n', encoding="utf-8")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(str(ROOT / name) for name in ("estimator", "profiler", "kernels")),
    )
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return file


def completed(script: str, line: str) -> list[str]:
    """What bash offers at the end of a line, as pressing Tab would."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    text = (
        f"{script}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n_estimate\nprintf '%s\\n'"
        ' "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-O", "extglob"], input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [found for found in done.stdout.splitlines() if found]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("estimate --checkp", ["--checkpointing"]),
        ("estimate pl", ["plan"]),
        ("estimate plan --max-b", ["--max-bs"]),
        ("estimate oom --check", ["--checkpointing"]),
        ("estimate measure --snap", ["--snapshot"]),
        ("estimate --precision bf16-a", ["bf16-amp", "bf16-autocast"]),
        ("estimate --model tinyl", ["tinyllama-1.1b"]),
        ("estimate --gpu rtx-4090-", ["rtx-4090-d", "rtx-4090-laptop"]),
        ("estimate plan --goal fewest", ["fewest-changes"]),
        ("estimate --no-such", []),
    ],
)
def test_bash_completes(bash_script: str, line: str, offered: list[str]) -> None:
    assert completed(bash_script, line) == offered


@pytest.mark.usefixtures("program")
def test_bash_completes_job_files(bash_script: str) -> None:
    Path("job.yaml").write_text("model: llama-7b\n", encoding="utf-8")
    Path("notes.txt").write_text("", encoding="utf-8")
    assert completed(bash_script, "estimate check j") == ["job.yaml"]
    assert completed(bash_script, "estimate check n") == []


@pytest.mark.usefixtures("program")
def test_bash_offers_every_command_and_only_flags_that_are_there(bash_script: str) -> None:
    commands = [word for word in completed(bash_script, "estimate ") if not word.startswith("-")]
    assert set(commands) == set(COMMANDS)
    for name in ("plan", "links", "allocator"):
        for flag in completed(bash_script, f"estimate {name} --"):
            assert flag in printed(name, "--help")


@pytest.mark.usefixtures("program")
@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("estimate --checkp", "--checkpointing"),
        ("estimate measure --snap", "--snapshot"),
        ("estimate --gpu rtx-409", "rtx-4090"),
        ("estimate --model tinyl", "tinyllama-1.1b"),
    ],
)
def test_fish_completes(line: str, offered: str, tmp_path: Path) -> None:
    script = tmp_path / "estimate.fish"
    script.write_text(printed("completion", "fish"), encoding="utf-8")
    done = subprocess.run(
        ["fish", "-N", "-c", f"source {script}; complete -C '{line}'"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == [offered], (
        done.stderr
    )


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_parse(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run(
        [shell, "-n"],
        input=printed("completion", shell),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_fish_quotes_are_balanced() -> None:
    for line in printed("completion", "fish").splitlines():
        assert (
            line.startswith(("#", "complete -c estimate ")) and line.count("'") % 2 == 0
        ) or line.startswith("#"), line


def test_doctor_says_versions_and_the_line_that_installs_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        doctor._WANTED,
        "no_such_module",
        ("an example", "pip install no-such-module", "no-such-module"),
    )
    text = printed("doctor")
    assert (
        f"{__version__} in " in text
        and f"{sys.version_info.major}.{sys.version_info.minor}" in text
    )
    assert (
        "--  no-such-module" in text
        and "missing, needed for an example; pip install no-such-module" in text
    )
    found = {row["what"]: row for row in json.loads(printed("doctor", "--json"))}
    assert found["no-such-module"]["good"] is False and found["napkinmath"]["good"] is True
    assert "GPU" in found or "driver" in found


def test_doctor_tells_calibrations_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "napkinmath.calibration.local_machine.gpu_names",
        lambda: ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "Riva 128"],
    )
    monkeypatch.setattr("napkinmath.calibration.local_machine.driver_version", lambda: "580.65")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    text = printed("doctor")
    assert (
        "580.65" in text
        and "2 x NVIDIA GeForce RTX 4090, speeds from its datasheet; measure it: estimate calibrate"
        in text
    )
    assert "Riva 128, not in the catalog" in text
