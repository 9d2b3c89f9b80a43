"""--markdown: valid tables of GitHub Flavored Markdown, whatever a cell holds and however wide the
terminal is."""

from __future__ import annotations

import re

import pytest
from cli.runs import TINY, run
from napkinmath.report.formats import BY_KEY, Answer, Sheet
from napkinmath.report.markdown import as_markdown

COMMANDS = {
    "estimate": (*TINY, "--gpu", "T4"),
    "two GPUs": (*TINY, "--gpu", "T4", "--gpu", "L4"),
    "models": ("models", "gpt2"),
    "gpus": ("gpus", "h100"),
    "check": ("check", *TINY, "--gpu", "T4"),
    "sweep": ("sweep", *TINY, "--bs", "1,2", "--gpu", "T4"),
    "plan": ("plan", *TINY, "--gpu", "T4", "--ctx", "64", "--lora", "--bs", "1"),
}
ODD = ("a|b", "\\|", "`x|y`", "two\nlines", "<b>", "*a* _b_ [c](d)", "", " ", "é", "$x$", "&amp;")
_PUNCTUATION = r"\\([!-/:-@\[-`{-~])"


def cells_of(line: str) -> list[str]:
    """A row's cells as GitHub divides them: at each bar without a backslash before it (spec 4.10);
    then a backslash before punctuation is dropped (spec 2.4)."""
    assert line.startswith("| ") and line.endswith(" |")
    parts = re.split(r"(?<!\\)(?:\\\\)*\|", line[1:-1])
    return [re.sub(_PUNCTUATION, r"\1", part.strip()) for part in parts]


def tables_of(text: str) -> list[list[list[str]]]:
    """The tables of a text, each a block of lines; everything else is a title or empty."""
    found: list[list[list[str]]] = []
    for block in re.split(r"\n\n(?=### |\| )|(?<=\n)\n", text.strip()):
        lines = [line for line in block.splitlines() if line]
        if lines and lines[0].startswith("### "):
            lines = lines[1:]
        if lines:
            assert all(line.startswith("|") for line in lines), block
            found.append([cells_of(line) for line in lines])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_table_is_whole(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: set[str] = set()
    for columns in ("20", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        done = run(*COMMANDS[command], "--markdown")
        assert done.code == 0, done.err
        texts.add(done.out)
    assert len(texts) == 1, "the terminal's width changes nothing"
    tables = tables_of(texts.pop())
    assert tables
    for heads, rule, *rows in tables:
        assert all(re.fullmatch(r"---:?", mark) for mark in rule)
        assert rows and {len(row) for row in (heads, rule, *rows)} == {len(heads)}


@pytest.mark.parametrize("text", ODD)
def test_a_cell_stands_for_itself(text: str) -> None:
    sheet = Sheet(heads=("x", "a|b"), rows=((text, "1"), ("2", text)), right=("a|b",), title=text)
    written = as_markdown(Answer(sheets=lambda: [sheet]))
    ((heads, rule, first, second),) = tables_of(written)
    one_line = " ".join(text.split())
    assert heads == ["x", "a|b"] and rule == ["---", "---:"]
    assert first == [one_line, "1"] and second == ["2", one_line]


@pytest.mark.slow
def test_markdown_has_the_cells_of_csv() -> None:
    import csv
    import io

    for command in ("models", "gpus", "sweep", "check", "plan"):
        rows = list(csv.reader(io.StringIO(run(*COMMANDS[command], "--csv").out)))
        ((heads, _, *found),) = tables_of(run(*COMMANDS[command], "--markdown").out)
        assert [heads, *found] == [[" ".join(c.split()) for c in row] for row in rows], command


def test_it_is_one_of_the_forms() -> None:
    assert BY_KEY["markdown"].text(Answer(sheets=lambda: ())) == ""
