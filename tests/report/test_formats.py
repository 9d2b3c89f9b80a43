"""Every form of an answer that a command's flags name is given, and says what the terminal says."""

from __future__ import annotations

import csv
import io
import json

import pytest
from cli.runs import TINY, run
from napkinmath.base.errors import InputError
from napkinmath.report.formats import BY_KEY, FORMS, Answer, Sheet, taken

COMMANDS: dict[str, tuple[str, ...]] = {
    "estimate": (*TINY, "--gpu", "T4"),
    "models": ("models", "gpt2"),
    "gpus": ("gpus", "h100"),
    "check": ("check", *TINY, "--gpu", "T4"),
    "sweep": ("sweep", *TINY, "--bs", "1,2", "--gpu", "T4"),
    "plan": ("plan", *TINY, "--gpu", "T4", "--ctx", "64", "--lora", "--bs", "1"),
}
SEVERAL_TABLES = {"estimate"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_forms_that_are_given(command: str) -> None:
    words = COMMANDS[command]
    text = run(*([words[0], "--help"] if command != "estimate" else ["--help", "all"])).out
    for form in FORMS:
        offered = f"--{form.key} " in text
        assert offered != (form.key == "csv" and command in SEVERAL_TABLES), form.key


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_form_that_is_not_json_has_what_json_has(command: str) -> None:
    """Each figure of the tables is text, each row is whole, and the exit code stays."""
    words = COMMANDS[command]
    plain, as_json = run(*words), run(*words, "--json")
    assert plain.code == as_json.code == 0, (plain.err, as_json.err)
    json.loads(as_json.out) if command != "check" else json.loads(as_json.out.splitlines()[0])
    for form in FORMS:
        if form.key != "json" and f"--{form.key}" in run(*words[:1], "--help").out:
            done = run(*words, f"--{form.key}")
            assert done.code == 0 and done.out.strip(), (form.key, done.err)


@pytest.mark.parametrize("command", ["models", "gpus", "sweep"])
def test_csv_has_the_cells_of_the_table(command: str) -> None:
    rows = list(csv.reader(io.StringIO(run(*COMMANDS[command], "--csv").out)))
    assert rows == [line.split("\t") for line in run(*COMMANDS[command]).out.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_two_forms_at_once_are_refused(command: str) -> None:
    words = COMMANDS[command]
    second = "--explain" if command == "estimate" else "--csv"
    done = run(*words, "--json", second)
    assert done.code == 2 and "two forms of the same answer" in done.err


def test_forms_are_told_apart_and_taken_from_the_options() -> None:
    assert len(BY_KEY) == len(FORMS)
    options: dict[str, object] = {"json": True, "bs": 1}
    form = taken(options)
    assert form is BY_KEY["json"] and options == {"bs": 1}
    with pytest.raises(InputError, match="--json and --csv"):
        taken({"csv": True, "json": True})


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
def test_odd_cells_are_one_cell(form) -> None:  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    odd = ('a|b "c", d\\', "two\nlines", "")
    sheet = Sheet(heads=("x", "y", "z"), rows=(odd,), right=("y",), title="a title")
    text = form.text(Answer(sheets=lambda: [sheet], json=lambda: json.dumps(odd)))
    if form.key == "csv":
        assert list(csv.reader(io.StringIO(text)))[1] == list(odd)
    elif form.key == "json":
        assert json.loads(text) == list(odd)
    else:
        assert "a title" in text
