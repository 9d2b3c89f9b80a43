"""Names in somebody's file reach the terminal without their control characters: none moves the
cursor, sets a title or starts a line that looks like an answer of ours."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from tests.cli.runs import TINY, run

FORGED = "DOES FIT"
HOSTILE = f"\x1b[2J\x1b]0;title\x07\r\n{FORGED}\u2028{FORGED}"


def axolotl(name: str) -> bytes:
    return f"{json.dumps(name)}: 3\nbase_model: gpt2\nsequence_len: 64\ndatasets: []\n".encode()


def script(name: str) -> bytes:
    return f"python train.py --model_name_or_path gpt2 --optim adamw_torch '--{name}' 3".encode()


def flag_of_deepspeed(name: str) -> bytes:
    return json.dumps({"zero_optimization": {"stage": 1}, name: {"a": 1}}).encode()


def calibration(name: str) -> bytes:
    content = {"napkinmath_calibration": 2, "gpu": "T4", "stamp": {name: name}, "notes": [name]}
    return json.dumps(content | {"rates": {}}).encode()


def snapshot(name: str) -> bytes:
    event = {"action": "alloc", "addr": 0, "size": 1 << 20, "stream": 0}
    event["frames"] = [{"name": name, "filename": name, "line": 7}]
    return pickle.dumps({"segments": [], "device_traces": [[event]]})


ASKED = {
    "job.yaml": (axolotl, ("FILE", "--gpu", "t4")),
    "run.sh": (script, ("FILE", "--gpu", "t4")),
    "ds.json": (flag_of_deepspeed, (*TINY, "--gpus", "2xt4", "--deepspeed", "FILE")),
    "calibration.json": (calibration, ("calibration", "show", "FILE")),
    "snapshot.pickle": (snapshot, ("oom", "FILE")),
}


@pytest.mark.parametrize("name", ASKED)
def test_names_in_files_are_spelt_out(name: str, tmp_path: Path) -> None:
    content, argv = ASKED[name]
    path = tmp_path / name
    path.write_bytes(content(HOSTILE))
    done = run(*(str(path) if word == "FILE" else word for word in argv))
    said = done.out + done.err
    assert FORGED in said or "title" in said, said
    assert all(line.isprintable() for line in said.split("\n"))
    assert not any(line.startswith(FORGED) for line in said.split("\n"))


def test_what_cannot_be_read_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({HOSTILE + str(i): 1 for i in range(9)}), encoding="utf-8")
    done = run(str(path))
    assert done.code == 2 and done.err.rstrip("\n").isprintable()
