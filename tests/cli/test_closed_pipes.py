"""A reader that goes away changes no exit code; a closed standard error spoils no answer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs bash and /dev/full")
ESTIMATE = f"{sys.executable} -m napkinmath"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("check --model llama-3.1-8b --full --gpu t4", 1),
        ("check --model gpt2 --full --gpu h100", 0),
        ("--model llama-3.1-8b --full --gpu t4", 1),
        ("--model llama-3.1-8b --full --gpu t4 --json", 1),
        ("--model gpt2 --gpu h100 --explain", 0),
        ("sweep --model gpt2 --bs 1..64 --ctx 128..1024:128", 0),
        ("--model nonsense", 2),
    ],
)
def test_a_closed_pipe_changes_no_exit_code(command: str, code: int) -> None:
    line = f"{ESTIMATE} {command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--model openai/whisper-large-v3 --lora --gpu rtx3090 --bs 8", 1),  # with a note
        ("--model nonsense", 2),
    ],
)
def test_a_reader_of_both_outputs_who_goes_away_changes_no_exit_code(
    command: str, code: int
) -> None:
    line = f"{{ {ESTIMATE} {command} 2>&1; echo $? >&3; }} 3>&2 | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr.split() == [str(code)]


def test_notes_do_not_go_among_the_answers_where_standard_error_is_closed() -> None:
    line = f"{ESTIMATE} --model gpt2 --ctx 4096 --json 2>&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2)
    assert not done.stdout or json.loads(done.stdout)


def test_a_full_disk_is_one_line() -> None:
    line = f"{ESTIMATE} --model gpt2 --gpu h100 > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
