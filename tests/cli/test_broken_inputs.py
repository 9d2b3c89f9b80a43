"""Every broken input gives exit code 2 and exactly one line on standard error that quotes it, never
a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.broken_inputs import CORPUS, Broken
from napkinmath.cli.main import main

LEAST_CASES = 200
LONGEST_LINE = 900
SUBPROCESS_CASES = CORPUS[:: len(CORPUS) // 8]
ROOT = Path(__file__).resolve().parents[2]


def prepare(case: Broken, folder: Path) -> list[str]:
    """Makes the case's files and returns its command line with their paths."""
    for name, content in case.files:
        path = folder / name
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            assert isinstance(content, Callable)
            content(path)
    return [
        str(folder / word[1:]) if word.startswith("@") else "" if word == "''" else word
        for word in case.argv
    ]


def check(case: Broken, code: int, out: str, err: str) -> None:
    assert code == 2, (code, out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("estimate: ")
    assert case.quoted.lower() in lines[0].lower(), (case.quoted, lines[0])
    assert "Traceback" not in err and len(lines[0]) <= LONGEST_LINE
    assert lines[0].isprintable() or "\t" in lines[0]


def skip_if_root_reads_everything(case: Broken) -> None:
    if case.quoted == "permission denied" and os.geteuid() == 0:
        pytest.skip("root may read any file")


def test_corpus_is_as_large_as_promised() -> None:
    assert len({(case.argv, str(case.files)) for case in CORPUS}) >= LEAST_CASES


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    CORPUS,
    ids=lambda case: " ".join(case.argv)[:60].encode("ascii", "backslashreplace").decode(),
)
def test_broken_input_is_refused_in_one_line(
    case: Broken, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_if_root_reads_everything(case)
    code = main(prepare(case, tmp_path))
    captured = capsys.readouterr()
    check(case, code, captured.out, captured.err)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    SUBPROCESS_CASES,
    ids=lambda case: " ".join(case.argv)[:60].encode("ascii", "backslashreplace").decode(),
)
def test_broken_input_through_a_real_process(case: Broken, tmp_path: Path) -> None:
    skip_if_root_reads_everything(case)
    done = run(prepare(case, tmp_path))
    check(case, done.returncode, done.stdout.decode(), done.stderr.decode())


def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own."""
    code = "from napkinmath.cli.main import entry; entry()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "estimator")}
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        env=environment,
        timeout=60,
        **options,
    )  # type: ignore[call-overload]


def test_refused_permission_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root reads everything, so the system's refusal is played where the corpus cannot provoke
    it."""
    file = tmp_path / "config.json"
    file.write_text("{}")

    def refuse(path: str, flags: int, mode: int = 0o777, **_: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("napkinmath.models.config_file.os.open", refuse)
    code = main(["--model", str(file)])
    captured = capsys.readouterr()
    check(Broken((), "permission denied"), code, captured.out, captured.err)


def test_debug_raises_instead(tmp_path: Path) -> None:
    done = run(["--model", "lama-9", "--debug"])
    assert done.returncode == 1 and b"Traceback" in done.stderr and b"lama-9" in done.stderr


@pytest.mark.parametrize(
    "key", ["bs", "vram", "compile", "load_in_4bit", "bf16", "gradient_checkpointing"]
)
@pytest.mark.parametrize("ending", ["yaml", "toml"])
def test_a_number_of_thousands_of_digits_is_refused(
    key: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python reads them in base 16, and writes none of them in base 10."""
    own = key in ("bs", "vram", "compile")
    content = {"model": "gpt2"} if own else {"base_model": "gpt2", "micro_batch_size": 1}
    mark = ": " if ending == "yaml" else " = "
    lines = [f"{name}{mark}{json.dumps(value)}" for name, value in content.items()]
    path = tmp_path / f"job.{ending}"
    path.write_text("\n".join([*lines, f"{key}{mark}0x{'f' * 5000}"]) + "\n", encoding="utf-8")
    assert main([str(path), "--gpu", "t4"]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1, said.err[:300]
