"""Every way out that a refusal names is taken: for each place in the code that raises with a flag, a
command or a package to install, a command of `hints.txt` is refused there, and with what the
message says it is not refused there again."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import napkinmath
import pytest
from napkinmath.base.errors import InputError, NapkinError
from napkinmath.cli.main import main
from napkinmath.report import generation, json_report, table
from napkinmath.serving.answers import encoded
from napkinmath.serving.requests import options_of

SOURCE = Path(napkinmath.__file__).parent
HERE = Path(__file__).parent
TINY = '--arch "L2 h64 a4 kv2 f128 v256" --ctx 64'
MIXTURE = '--arch "L2 h64 a4 kv2 f128 v256 moe8x2" --ctx 64'
# What a plan would try, given: it prices one combination where a refusal is what counts.
FIXED = "--full --bs 4 --checkpointing none --optimizer adamw --loss chunked --kernels liger"
WORDS = {
    "FEW": f"{TINY} {FIXED} --precision bf16",
    "TINY": TINY,
    "MIXTURE": MIXTURE,
    "IMAGES": "--full --bs 4 --checkpointing none --optimizer adamw --precision bf16",
    "FIXED": FIXED,
}
PYTHON = ">>>"  # the row is two expressions
WAY = re.compile(r"(?<![\w{}-])--[a-z\0][a-z0-9-]*|pip install|; add \0|`--`|`?estimate [a-z]+")
# Commands that the tests of their own run, and that a message names beside what it refuses.
REFERRED = re.compile(
    r"`?estimate (?:--help|(?:models|gpus|trace|learn|calibrate|measure)\b)[^`]*`?"
)
# Words that only the shell of a script makes so long, and a script longer than is read.
GROWN = {
    "long.sh": "echo x\n" * 400_000,
    "grows.sh": f'A="{"x " * 30_000}"\ntorchrun t.py{" $A" * 9} --model_name_or_path gpt2',
    "word.sh": 'A="xxxxxxxx"\n'
    + 'A="$A$A"\n' * 22
    + "torchrun t.py -o $A --model_name_or_path gpt2",
}
# Places that no command of the table reaches, by the beginning of what they say, and why.
ELSEWHERE = {
    "no folder was named; use --out DIR": "writes the page, which needs npm: test_static_page.py",
    "--port \0 cannot be used": "needs a taken port: tests/serving/test_serve.py, test_ports",
    "--lengths \0 has more than": "a file of 640 MB: tests/config/test_lengths_file.py",
    "--hub \0: its config.json": "needs a hub that answers: tests/inputs/test_hub.py, test_refusal_is_one_line",
    "\0 \0 is YAML, which needs PyYAML": "PyYAML is installed: tests/inputs/test_job_files.py",
    "\0 \0 is TOML, which needs tomli": "Python reads TOML itself: tests/inputs/test_more_trainers.py",
    "Parquet needs pandas and pyarrow": "both are installed: below",
    "--out \0 is being written": "needs two runs at once: tests/planning/test_batch.py",
    "--out \0 was begun with other jobs": "needs a run that was killed: tests/planning/test_batch.py",
    "no model was chosen; give": "is said to the page: below",
    "\0; the page takes catalogued names": "is said to the page: below",
    "no GPU was named; give --gpu NAME or --vram": "find_hardware(None) alone: no command calls it so",
    "nothing to price in \0": "a sweep of no values, which its flags cannot say",
    "\0 has no known rate for": "Hardware.dense_flops_per_s alone: tests/catalog/test_gpus.py",
    "memory_bytes=\0 must be": "Hardware(memory_bytes=0) alone: flags refuse the size before",
    "--calibration \0 says nothing without": "a file names its GPU, read before this is asked",
    "one of two configurations has no time": "guidelines of models without a GPU, which are not asked for",
    "--resident \0: it is not known": "every denoiser of the catalog has known encoders",
    "--image \0x\0: the processor makes": "no way out but another size: tests/models/test_pictures.py",
    "--image \0x\0: the projector makes": "no way out but another size: tests/models/test_pictures.py",
    "\0 keeps states that are not counted": "no model of the catalog keeps such states",
    "sequences longer than \0=\0": "a config longer than its learned form: test_learned_forms.py",
    "--loss \0 of a learned \0 head": "of no task whose loss can be asked for",
    "--rollout-memory \0 holds the cache": "what the share holds is refused before the time is asked",
}


class Row(NamedTuple):
    """A command that is refused and one that takes the way out, without what both begin with."""

    common: str
    refused: str
    follows: str

    def line(self, words: str) -> str:
        whole = words[1:] if words.startswith("=") else f"{self.common} {words}"
        return re.sub(rf"\b(?:{'|'.join(WORDS)})\b", lambda word: WORDS[word[0]], whole)


class Place(NamedTuple):
    """A call that makes an error: lines of its module, and the text with \\0 for what is filled in."""

    first: int
    last: int
    text: str


def rows() -> dict[str, list[Row]]:
    """The rows of `hints.txt` by the module whose refusal they are about."""
    found: dict[str, list[Row]] = {}
    module = ""
    for line in (HERE / "hints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            module = line[1:].strip()
        elif line:
            common, refused, follows = (part.strip() for part in line.split("|"))
            found.setdefault(module, []).append(Row(common, refused, follows))
    return found


def text_of(node: ast.AST) -> str:
    """A text of the code, \\0 for what is filled in when it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else "\0"


@cache
def places(module: str) -> tuple[Place, ...]:
    """Where a module makes an error whose text has a way out in it."""
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
    ]
    found = [
        Place(node.lineno, node.end_lineno or node.lineno, text_of(node.args[0]))
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id.endswith("Error")
    ]
    return tuple(place for place in found if WAY.search(REFERRED.sub("", place.text)))


MODULES = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))]
HINTING = [module for module in MODULES if places(module)]


class Refused(NamedTuple):
    """How a command line ended, and the places of a module whose error ended it."""

    code: int
    said: str
    at: frozenset[Place]


class Errors:
    """The errors that are made, each with the frame that makes it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, str]] = []

    def note(self, frame: FrameType, text: str) -> None:
        self.made.append((frame.f_code.co_filename, frame.f_lineno, text))

    def at(self, module: str, said: str) -> frozenset[Place]:
        """The places of a module whose error is what was said."""
        file = str(SOURCE / module)
        return frozenset(
            place
            for where, line, text in self.made
            for place in places(module)
            if where == file and place.first <= line <= place.last and _plain(text) in _plain(said)
        )


def _plain(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Errors:
    """A record of every error, in a run whose reports are not written: refusals come before."""
    found = Errors()

    def init(self: NapkinError, *args: object) -> None:
        found.note(sys._getframe(1), str(args[0]) if args else "")
        Exception.__init__(self, *args)

    monkeypatch.setattr(NapkinError, "__init__", init)
    monkeypatch.setattr(table, "print_report", lambda *_, **__: None)
    monkeypatch.setattr(json_report, "to_json", lambda _: "{}")
    monkeypatch.setattr(generation, "print_generation", lambda *_, **__: None)
    return found


def ended(line: str, module: str, errors: Errors, *, is_python: bool) -> Refused:
    errors.made.clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if not is_python:
            code = main(shlex.split(line))
        else:
            try:
                code = 0 if eval(line, {"napkinmath": napkinmath}) is not None else 2
            except NapkinError as error:
                code = print(str(error), file=err) or 2
    return Refused(code, err.getvalue(), errors.at(module, err.getvalue()))


def unsaid(row: Row, said: str) -> set[str]:
    """What a row adds that the message did not say."""
    before, after = (
        set(shlex.split(row.line(words).partition(" -- ")[0]))
        for words in (row.refused, row.follows)
    )
    if row.follows.startswith("="):
        name = row.follows[1:].split()[0]
        return set() if name in said or name.startswith("--") or name == "TINY" else {name}
    added = {word.partition("=")[0] for word in after - before if word.startswith("--")}
    return {flag for flag in added if flag not in said} - {"--", "--help"}


@pytest.mark.slow
@pytest.mark.parametrize("module", HINTING)
def test_every_way_out_is_one(
    module: str, errors: Errors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    reached = set[Place]()
    for number, row in enumerate(rows().get(module, ())):
        folder = tmp_path / str(number)
        shutil.copytree(HERE / "hint_files", folder)
        (folder / "emptydir").mkdir()
        for name in GROWN.keys() & shlex.split(row.line(row.refused)):
            (folder / name).write_text(GROWN[name])
        monkeypatch.chdir(folder)
        is_python = row.common == PYTHON
        if is_python:
            row = row._replace(common="")
        first = ended(row.line(row.refused).strip(), module, errors, is_python=is_python)
        assert first.code == 2 and first.at, (row, first.said)
        then = ended(row.line(row.follows).strip(), module, errors, is_python=is_python)
        assert then.code in (0, 1, 3) and not (first.at & then.at), (row, first.said, then.said)
        assert is_python or not unsaid(row, first.said), (row, first.said)
        reached |= first.at
    left = [p.text for p in places(module) if p not in reached]
    assert not [text for text in left if not text.startswith(tuple(ELSEWHERE))], module


def test_a_table_is_written_without_what_parquet_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.chdir(tmp_path)
    sweep = shlex.split(f"sweep {TINY} --bs 1,2 --out")
    assert main([*sweep, "t.parquet"]) == 2
    assert "pip install pandas pyarrow; .csv and .jsonl need neither" in capsys.readouterr().err
    assert main([*sweep, "t.csv"]) == 0 == main([*sweep, "t.jsonl"])


@pytest.mark.parametrize("body", [{}, {"model": "gpt22"}])
def test_what_the_page_says_instead_of_a_model_is_answered(body: dict[str, str]) -> None:
    def answer(options: dict[str, str]) -> bytes:
        return encoded("/api/estimate", options_of(json.dumps(options).encode()))

    with pytest.raises(InputError, match="--arch among the further options"):
        answer(body)
    assert answer({"arch": "L2 h64 a4 kv2 f128 v256", "ctx": "64"})


def test_what_is_left_to_other_tests_is_there() -> None:
    every = [place.text for module in HINTING for place in places(module)]
    for beginning, why in ELSEWHERE.items():
        assert why and any(text.startswith(beginning) for text in every), beginning
    assert len(every) > 200  # else the search is at fault
