"""Tables fit the terminal at every width, and lose nothing that they do not name."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath.cli.main import main
from napkinmath.report.columns import NO_WIDTH, fitted, folded
from napkinmath.report.formats import Sheet
from napkinmath.report.screen import cut_between_words, wrap

WIDTHS = (60, 80, 100, 160)
COMMANDS = (
    "gpus rtx",
    "models llama",
    "models tinyllama --fits rtx4060 --qlora",
    "sweep --model tinyllama --method lora,qlora --bs 1,2 --gpu rtx4090 --price 2",
    "links --gpus 2xh100",
    "links",
    "plan --model tinyllama --gpu rtx4060 --gpu rtx4090 --ctx 1k --price 1 --method lora,qlora",
    "plan --model tinyllama --gpu rtx4090 --gpus 2 --ctx 1k --method lora",
    "--model tinyllama --qlora --gpu rtx4060",
)
_CELL = st.text("ab -.0", max_size=40).map(lambda text: " ".join(text.split()))


@st.composite
def sheets(draw: st.DrawFn) -> Sheet:
    heads = draw(st.lists(st.text("abc ", min_size=1, max_size=12), min_size=1, unique=True))
    heads = [" ".join(head.split()) or f"h{number}" for number, head in enumerate(heads)]
    heads = list(dict.fromkeys(heads))[:14]
    row = st.tuples(*(_CELL for _ in heads))
    right = tuple(draw(st.lists(st.sampled_from(heads), unique=True)))
    least = tuple(draw(st.lists(st.sampled_from(heads), unique=True)))
    rows = tuple(draw(st.lists(row, max_size=4)))
    return Sheet(heads=tuple(heads), rows=rows, right=right, least=least)


@settings(max_examples=150, deadline=None)
@given(sheets(), st.sampled_from((*WIDTHS, NO_WIDTH)), st.sampled_from(["", "  "]))
def test_no_line_is_wider_than_the_terminal_and_what_is_left_out_is_named(
    sheet: Sheet, width: int, indent: str
) -> None:
    lines = fitted(sheet, width, indent=indent)
    assert max(map(len, lines)) <= width
    gone = " ".join(" ".join(lines).partition("left out at")[2].split())
    text = "".join("".join(lines).split())
    for column, head in enumerate(sheet.heads):
        cells = {row[column] for row in sheet.rows}
        if head not in gone and cells - {"", "-"}:
            assert all(word in text for word in head.split())
            assert all(word[:8] in text for cell in cells for word in cell.split())
    assert not (gone and width == NO_WIDTH)


def test_what_all_rows_share_stands_once_and_numbers_keep_their_columns() -> None:
    rows = (("a", "fits", "1", "x"), ("longer", "fits", "200", "y"))
    sheet = Sheet(heads=("name", "verdict", "size GiB", "note"), rows=rows, right=("size GiB",))
    assert fitted(sheet, 80) == [
        "all: verdict fits",
        "name    size GiB  note",
        "a              1  x",
        "longer       200  y",
    ]


@pytest.mark.parametrize("width", [20, 60])
def test_prose_is_broken_between_words(width: int) -> None:
    text = "four bit weights save most of the memory that weights take, and cost some speed"
    found = folded(text, width, indent="  ")
    assert max(map(len, found.splitlines())) <= width
    assert " ".join(found.split()) == text


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_fits_the_terminal(
    line: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that is to be copied is one line, however long it is."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(line.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    wide = [text for text in lines if len(text) > width and not text.startswith("run it:")]
    assert wide == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("line", ["--help all", "plan --help", "generate --help"])
def test_every_flag_is_explained_within_the_terminal(
    line: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(line.split()) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert shown.split() == piped.split()


def test_a_name_too_long_is_broken_behind_a_hyphen() -> None:
    assert wrap("wizardcoder-python-34b-v1.0", 17) == ["wizardcoder-", "python-34b-v1.0"]
    assert wrap("--optimizer-in-backward", 18) == ["--optimizer-in-", "backward"]
    assert wrap("--" + "a" * 10, 8) == ["--aaaaaa", "aaaa"]


@pytest.mark.parametrize("width", [1, 5, 17, 60])
def test_nothing_of_a_text_is_lost_where_it_is_cut_or_broken(width: int) -> None:
    text = "fp32: embed_tokens 500 MiB, wizardcoder-python-34b-v1.0 --- lm_head"
    rows = wrap(text, width)
    assert "".join(rows).replace(" ", "") == text.replace(" ", "")
    assert all(len(row) <= width for row in rows)
    shorter = cut_between_words(text, max(width, 8))
    assert len(shorter) <= max(width, 8) and shorter.endswith("…")
    kept = shorter.removesuffix(" …")
    assert text.startswith(kept)
    assert text[len(kept)] == " " or " " not in kept
