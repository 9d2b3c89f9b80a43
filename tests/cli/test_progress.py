"""The line of progress: on a terminal only, late, gone when done, and never within an answer."""

from __future__ import annotations

import io
import time

import pytest
from napkinmath.base.progress import NOW, counted
from napkinmath.cli import progress
from napkinmath.cli.main import main
from napkinmath.cli.progress import Guarded, ProgressLine, line, started

GONE = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(text: str) -> str:
    """What a terminal shows after the text: a line that is taken back is not there."""
    rows = [""]
    for part in text.replace(GONE, "\0").replace("\n", "\0\n").split("\0"):
        rows = [*rows, part[1:]] if part.startswith("\n") else [*rows[:-1], part]
    return "\n".join(rows)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    monkeypatch.setenv("TERM", "xterm")


def wait_for(stream: io.StringIO, text: str) -> None:
    limit = time.monotonic() + 20
    while text not in stream.getvalue():
        assert time.monotonic() < limit, stream.getvalue()
        time.sleep(0.001)


def test_the_line_tells_what_the_loop_is_at_and_is_gone_at_the_end(hasty: None) -> None:
    stream = Terminal()
    drawn = ProgressLine(stream, "plan")
    for number in counted(range(4), "combinations", 4):
        if number == 3:
            wait_for(stream, "3 of 4 combinations")
    drawn.end()
    assert NOW.what == ""
    assert stream.getvalue().endswith(GONE)
    ended = stream.getvalue()
    time.sleep(0.02)
    assert stream.getvalue() == ended, "drawn after its end"


def test_what_is_written_takes_the_lines_place(hasty: None) -> None:
    stream = Terminal()
    drawn = ProgressLine(stream, "sweep")
    out = Guarded(stream, drawn)
    wait_for(stream, "sweep")
    print("first", file=out)
    out.write("half ")
    before = stream.getvalue()
    time.sleep(0.02)
    assert stream.getvalue() == before, "drawn within a line that is being written"
    print("done", file=out)
    drawn.end()
    assert shown(stream.getvalue()).replace("\n\n", "\n").strip() == "first\nhalf done"


@pytest.mark.parametrize("total", [0, 7])
@pytest.mark.parametrize("done", [0, 3, 7, 9])
@pytest.mark.parametrize("what", ["", "jobs"])
def test_any_state_makes_one_line(what: str, done: int, total: int) -> None:
    NOW.say(what, done, total)
    try:
        text = line("plan", 3.0, 1.5, unicode=False)
    finally:
        NOW.say("")
    assert text.startswith("plan") and "\n" not in text and text.isascii()
    assert ("left" in text) == (what == "jobs" and 0 < done < total)


def test_the_outer_loop_is_told_and_a_broken_one_ends() -> None:
    for _ in counted([1, 2], "jobs", 2):
        assert list(counted("ab", "inner")) == ["a", "b"]
        assert NOW.what == "jobs"
        break
    assert NOW.what == ""


@pytest.mark.parametrize("command", progress.SILENT)
def test_commands_that_wait_or_draw_have_no_line(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert started([command]) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_has_it_on_a_terminal_only(
    terminal: bool, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, out = Terminal() if terminal else io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", out)
    sizes = "--bs 1,2 --ctx 64..256:64"
    code = main(f"sweep --model llama-7b --qlora --gpu rtx4090 --exact {sizes}".split())
    assert code == 0 and "\x1b[K" not in out.getvalue()
    assert ("of 8 jobs" in stream.getvalue()) == terminal
    assert "jobs" not in shown(stream.getvalue()), "something of the line is left"
