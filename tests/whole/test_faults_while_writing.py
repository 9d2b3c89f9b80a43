"""Whatever call of the file system fails, and whenever a command is interrupted while it writes: the
old file or the new one is whole, nothing temporary is left, and a batch goes on to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import napkinmath.planning.batch as batch_module
import pytest
from base.faults import each_fault
from cli.runs import TINY, run

OLD = "what was there before\n"
JOBS = [
    f'{{"model": "gpt2", "bs": {number}, "ctx": 64}}' if number % 3 else "nonsense"
    for number in range(1, 9)
]
# (file, what writes it)
WRITERS = (
    ("grid.csv", ("sweep", *TINY, "--bs", "1..3", "--out", "{}")),
    ("grid.jsonl", ("sweep", *TINY, "--bs", "1..3", "--out", "{}")),
    ("step.svg", (*TINY, "--timeline", "{}")),
    ("step.html", (*TINY, "--timeline", "{}")),
    ("links.svg", ("links", "--gpus", "8xH100", "--plot", "{}")),
)


def done(folder: Path, *words: str) -> tuple[int, str]:
    found = run(*words)
    return found.code, found.err if found.code else ""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), WRITERS, ids=[name for name, _ in WRITERS])
def test_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...]
) -> None:
    whole = tmp_path / name
    assert run(*(word.format(whole) for word in words)).code == 0
    new = whole.read_bytes()

    def check(folder: Path) -> None:
        assert [path.name for path in folder.iterdir()] == [name]
        assert (folder / name).read_bytes() in (OLD.encode(), new)

    calls = each_fault(
        monkeypatch,
        tmp_path,
        lambda folder: (folder / name).write_text(OLD) and None,
        lambda folder: done(folder, *(word.format(folder / name) for word in words), "--force"),
        check,
    )
    assert calls >= 4  # it opens, writes, sends to the disk and renames


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["new", "forced"])
def test_a_batch_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(batch_module, "CHUNK_LINES", 3)
    source = tmp_path / "jobs.jsonl"
    source.write_text("\n".join(JOBS))
    words = ("batch", str(source), "--out")
    assert run(*words, str(tmp_path / "out")).code == 2
    outputs = ("out", "out.bad.jsonl")
    new = [(tmp_path / name).read_bytes() for name in outputs]

    def prepare(folder: Path) -> None:
        if again:
            assert run(*words, str(folder / "out"), "--bs", "2").code == 2

    def check(folder: Path) -> None:
        for name in outputs:
            if (folder / name).exists():
                for line in (folder / name).read_bytes().splitlines(keepends=True):
                    assert line.endswith(b"\n") and json.loads(line)
        last = run(*words, str(folder / "out"))
        if "add --force" in last.err:  # it was ended before it had begun, or after it was done
            last = run(*words, str(folder / "out"), "--force")
        assert last.code == 2, last
        assert [(folder / name).read_bytes() for name in outputs] == new
        assert sorted(path.name for path in folder.iterdir()) == sorted(outputs)

    calls = each_fault(
        monkeypatch,
        tmp_path,
        prepare,
        lambda folder: done(folder, *words, str(folder / "out"), *(["--force"] * again)),
        check,
    )
    assert calls > 10


def test_a_calibration_is_removed_or_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"napkinmath_calibration": 2, "gpu": "H100", "rates": {}}

    def check(folder: Path) -> None:
        assert json.loads((folder / "c.json").read_text()) == content

    calls = each_fault(
        monkeypatch,
        tmp_path,
        lambda folder: (folder / "c.json").write_text(json.dumps(content)) and None,
        lambda folder: done(folder, "calibration", "remove", str(folder / "c.json")),
        check,
    )
    assert calls == 1


@pytest.mark.parametrize("place", ["missing/{}", "file/{}", "folder.{}", "x" * 300 + ".{}"])
@pytest.mark.parametrize(
    ("name", "words"), (*WRITERS, ("answers.jsonl", ("batch", "{jobs}", "--out", "{}")))
)
def test_a_place_that_takes_no_file_is_one_line(
    tmp_path: Path, name: str, words: tuple[str, ...], place: str
) -> None:
    """A folder that is not there, a file for a folder, a folder for a file, a name too long."""
    (tmp_path / "jobs.jsonl").write_text("\n".join(JOBS))
    (tmp_path / "file").write_text(OLD)
    target = tmp_path / place.format(name)
    if place.startswith("folder"):
        target.mkdir()
    before = sorted(tmp_path.rglob("*"))
    found = run(*(word.format(target, jobs=tmp_path / "jobs.jsonl") for word in words), "--force")
    lines = [line for line in found.err.splitlines() if line.startswith("estimate: ")]
    assert found.code == 2 and len(lines) == 1, found
    assert str(target)[:150] in lines[0]
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == OLD
