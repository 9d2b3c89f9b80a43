"""One way to write a file: whole or not at all, never over one that is there unless told to, and one
line where it cannot be; and nothing in the product writes in another way."""

from __future__ import annotations

import ast
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from base.faults import BROKEN, FULL, each_fault, ended
from napkinmath.base import whole_file
from napkinmath.base.errors import InputError
from napkinmath.base.whole_file import NotWritten, append_whole, write_whole

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("estimator", "profiler", "kernels", "benchmarks/campaign")
MECHANISM = {"base/whole_file.py"}
# file -> (calls, why they are no file of results)
EXCEPTIONS = {
    "planning/batch.py": (2, "outputs that grow, through append_whole"),
    "campaign_parts/ledger.py": (3, "rows that are added, through append_whole"),
    "cli/main.py": (2, "the null device"),
    "triton_kernels/tile_choice.py": (1, "a part that replaces the file; kernels import nothing"),
}


# ---------------------------------------------------------------- the mechanism


@pytest.mark.parametrize("old", [None, "old"])
def test_every_fault_leaves_the_old_file_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    def check(folder: Path) -> None:
        assert {path.name for path in folder.iterdir()} <= {"a.txt"}
        found = (folder / "a.txt").read_text() if (folder / "a.txt").exists() else None
        assert found in (old, "new" * 99)

    calls = each_fault(
        monkeypatch,
        tmp_path,
        lambda folder: None if old is None else (folder / "a.txt").write_text(old) and None,
        lambda folder: ended(lambda: write_whole(folder / "a.txt", "new" * 99, force=True)),
        check,
        (FULL, BROKEN, KeyboardInterrupt()),
    )
    assert calls == 4  # open, write, fsync, replace


def test_lines_are_added_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(folder: Path) -> None:
        for line in (b"second\n", b"third\n"):
            with open(folder / "rows", "ab") as file:
                append_whole(file, line)

    whole = b"first\nsecond\nthird\n"
    each_fault(
        monkeypatch,
        tmp_path,
        lambda folder: (folder / "rows").write_bytes(b"first\n") and None,
        lambda folder: ended(lambda: act(folder)),
        lambda folder: _is_whole_beginning((folder / "rows").read_bytes(), whole),
    )


def _is_whole_beginning(found: bytes, whole: bytes) -> None:
    assert whole.startswith(found) and found.endswith(b"\n")


def test_a_content_that_fails_is_its_own_error(tmp_path: Path) -> None:
    def content(_: object) -> None:
        raise InputError("the rows cannot be priced")

    (tmp_path / "a").write_text("old")
    with pytest.raises(InputError, match=r"^the rows cannot be priced$"):
        write_whole(tmp_path / "a", content, force=True)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_links_and_modes_stay(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    seen: list[str] = []

    def content(_: object) -> None:
        write_whole(tmp_path / "a", "of another", force=True)
        seen.extend(os.listdir(tmp_path))

    (tmp_path / f".a.0badcafe{whole_file.PARTIAL}").write_text("half")
    write_whole(tmp_path / "a", content, force=True)
    assert len(seen) == 2  # what the outer call writes, and the file of the inner one
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_came_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists; add --force"):
        write_whole(tmp_path / "a", lambda _: (tmp_path / "a").write_text("of another"))
    assert (tmp_path / "a").read_text() == "of another" and os.listdir(tmp_path) == ["a"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no path"),
        ("bad\0name", "no path"),
        ("\ud800", "no path"),
        ("folder", "is a folder"),
        ("pipe", "not a regular file"),
        ("there", "add --force"),
        ("missing/a", "does not exist; make it"),
        ("there/a", "its folder is a file"),
        ("x" * 300, "too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").write_text("old")
    with pytest.raises(InputError, match=words) as caught:
        write_whole(os.path.join(str(tmp_path), name) if name else name, "new", what="file")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe", "there"]
    assert (tmp_path / "there").read_text() == "old"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "its folder cannot be written"),
        (errno.EROFS, "its folder cannot be written"),
        (errno.EIO, "check the folder and the disk"),
    ],
)
def test_what_the_disk_refuses_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(NotWritten, match=words) as caught:
        write_whole(tmp_path / "a", "new")
    assert caught.value.errno == number and os.listdir(tmp_path) == []


# ---------------------------------------------------------------- nothing else writes


def writing_calls(tree: ast.AST) -> list[ast.Call]:
    """Calls that make, fill, rename or remove a file."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _writes(node)]


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    words = [n.value for arg in given for n in ast.walk(arg) if isinstance(n, ast.Constant)]
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name == "open" and owner != "os":
        modes = [word for word in words if isinstance(word, str) and set(word) <= set("rwaxbt+")]
        return any(set(mode) & set("wax+") for mode in modes)
    if name in ("savefig", "save", "to_csv", "to_parquet", "to_json", "dump", "tofile"):
        return not _into_a_stream(call)
    return (
        name in ("write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "copyfile", "fdopen")
        or (owner == "os" and name in ("replace", "rename", "truncate"))
        or (owner == "shutil" and name in ("move", "copy", "copy2"))
    )


def _into_a_stream(call: ast.Call) -> bool:
    """Whether what a library writes goes into a stream, or is no writing of a library."""
    into = [*call.args, *(k.value for k in call.keywords)]
    names = {getattr(value, "id", getattr(value, "value", "")) for value in into}
    library = getattr(getattr(call.func, "value", None), "id", "")
    if isinstance(call.func, ast.Name):
        return True  # a function of ours
    if library in ("torch", "json", "pickle", "np", "numpy"):
        return "file" in names
    return bool(names & {"file", "out", None})


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_else_writes_a_file(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = "/".join(path.parts[-2:])
        found = writing_calls(ast.parse(path.read_text(encoding="utf-8")))
        allowed = EXCEPTIONS.get(name, (0, ""))[0]
        if name not in MECHANISM:
            lines = [call.lineno for call in found]
            assert len(found) <= allowed, f"{path}, lines {lines}: use base.whole_file.write_whole"
            assert not allowed or len(found) == allowed, f"{name} has fewer such calls now"


@pytest.mark.parametrize(
    "code",
    [
        'open(path, "w")',
        'open(path, mode="a")',
        'path.open("xb")',
        'open(path, "r+b")',
        "path.write_text(text)",
        "figure.savefig(path)",
        "torch.save(state, path)",
        "os.replace(a, b)",
        "table.to_csv(path)",
    ],
)
def test_the_test_knows_a_writer(code: str) -> None:
    assert writing_calls(ast.parse(code)), code


def test_the_mechanism_is_cheap_to_load() -> None:
    code = (
        "import sys; import napkinmath.base.whole_file; heavy = {'tempfile', 'shutil', 'random',"
        " 'typing', 'json'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
