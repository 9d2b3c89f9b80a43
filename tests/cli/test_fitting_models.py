"""`estimate models --fits GPU`: its rows are those that the estimate itself finds fitting."""

from __future__ import annotations

import json

import pytest
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.catalog.models import load_rows
from napkinmath.cli.main import main
from napkinmath.inputs.jobs import priced
from napkinmath.report.listing import model_rows


@pytest.mark.parametrize("word", ["tinyllama", "qwen2.5-7b"])
@pytest.mark.parametrize("method", ["qlora", "full"])
def test_the_rows_are_what_the_estimate_says(
    word: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["models", word, "--fits", "rtx4060", "--method", method, "--json"])
    found = json.loads(capsys.readouterr().out)
    expected: set[str] = set()
    for row in model_rows([word]):
        try:
            (e,) = priced({"model": row["name"], "gpu": ["rtx4060"], "method": method}, [])
        except InputError:
            continue
        if e.verdict is not Verdict.DOES_NOT_FIT:
            expected.add(row["name"])
    assert {row["model"] for row in found} == expected
    assert code == (0 if expected else 1)
    sizes = [row["parameters"] for row in found]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("models --fits", "--fits needs a value"),
        ("models --fits= llama-7b", "names no GPU"),
        ("models --fits nogpu llama-7b", "nogpu"),
        ("models --fits nogpu llama-7b gpt2", "nogpu"),
        ("models --fits nogpu", "nogpu"),
        ("models --fits rtx4090 --qlora --bs 0 llama-7b", "--bs"),
        ("models --fits rtx4090 --gpu h100 llama-7b", "--gpu"),
        ("models --fits rtx4090 nosuchmodel", "nosuchmodel"),
        ("models --qlora", "--fits"),
    ],
)
def test_what_cannot_be_is_one_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert says in capsys.readouterr().err


def test_what_is_left_out_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["models", "deepseek", "--fits", "rtx4090", "--qlora"])
    out, err = capsys.readouterr()
    named = [line.split("\t")[0] for line in out.splitlines()]
    rows = model_rows(["deepseek"])
    assert code == 0 and "deepseek-coder-6.7b" in named and "deepseek-v3" not in named
    assert len(rows) < len(load_rows())
    assert "not fit" in err and "no answer" in err
