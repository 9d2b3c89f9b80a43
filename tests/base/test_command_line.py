"""Commands that the program composes: whatever an option holds, a shell reads back that and runs
nothing else."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys

import pytest
from napkinmath.base.command_line import METHOD_FLAGS, command, flags, posix, powershell, words
from napkinmath.base.errors import InputError
from napkinmath.cli.flag_rows import TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.main import main
from napkinmath.cli.parser import Parser

PARSER = Parser("estimate", "", SHARED)
TEXT_FLAGS = sorted(
    row[0][0].removeprefix("--").replace("-", "_")
    for _, rows in SHARED
    for row in rows
    if row[1] == TEXT
)
PIECES = (
    *" '\"`$;&|<>()[]{}*?~#!%^\\=,@-+:/\t\n\r\x00\x1b",
    *("$(touch x)", "`id`", "; rm -rf ~", "&& id", "|| id", "%PATH%", "!!", "--hub", "-g", "--"),
    *("\u2018", "\u2019", "\u201a", "\u201b", "\u201c", "\u2028", "é", "٣", "名", "\u202e"),
    *("q_proj", "L2 h64", "4", "2k", "24GiB", "a,b", "''", "'\\''", "${IFS}", "$'\\n'", "@args"),
)
QUOTES = "'\u2018\u2019\u201a\u201b"  # all of them end a PowerShell string, and two of them are one


def hostile(chance: random.Random) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randint(1, 6)))


def generated(count: int) -> list[dict[str, object]]:
    chance = random.Random(7)
    found: list[dict[str, object]] = []
    for _ in range(count):
        options: dict[str, object] = {
            name: hostile(chance) for name in chance.sample(TEXT_FLAGS, chance.randint(1, 4))
        }
        options["clip"] = chance.random() < 0.5
        options["gpu"] = [hostile(chance) for _ in range(chance.randint(1, 3))]
        options["method"] = chance.choice(("full", "lora", "qlora", "dora", hostile(chance)))
        found.append(options)
    return found


def parsed(given: list[str]) -> dict[str, object]:
    """What the command line's own parser makes of a command's words."""
    assert given[0] == "estimate"
    options = PARSER.parse(given[1:])
    (options["method"],) = options["method"]  # pyright: ignore
    return options


def read_by_powershell(text: str) -> list[str]:
    """The words that PowerShell makes of a command in argument mode, by its rules for the characters
    that are allowed here; fails on any that could mean something else."""
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == " ":
            at += 1
        elif text[at] in QUOTES:
            word, at = "", at + 1
            while text[at] not in QUOTES or text[at + 1 : at + 2] in tuple(QUOTES):
                at += text[at] in QUOTES
                word, at = word + text[at], at + 1
            at += 1
            assert text[at : at + 1] in ("", " "), "a string ends its word"
            found.append(word)
        else:
            word = text[at:].partition(" ")[0]
            assert word.isdigit() or word.replace("-", "").replace("_", "").isalnum(), word
            assert word.isascii() and (word.isdigit() or not word[0].isdigit()), word
            found.append(word)
            at += len(word)
    return found


def test_a_posix_shell_reads_back_the_options() -> None:
    for options in generated(400):
        assert parsed(shlex.split(command(options))) == options
        assert shlex.split(flags(options)) == words(options)


@pytest.mark.skipif(sys.platform == "win32", reason="no POSIX shell")
def test_a_real_shell_hands_over_the_same_words() -> None:
    made = [o for o in generated(60) if "\0" not in str(o) and not any("\0" in w for w in words(o))]
    script = "estimate() { printf '%s\\0' \"$@\"; printf '\\0'; }\n" + "\n".join(map(command, made))
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert not done.stderr
    assert done.stdout.decode() == "".join(
        "".join(word + "\0" for word in words(options)) + "\0" for options in made
    )


def test_powershell_reads_back_the_options_or_the_text_is_refused() -> None:
    read = 0
    for options in generated(400):
        if any(mark in word for word in words(options) for mark in '"\\'):
            with pytest.raises(InputError, match="PowerShell"):
                command(options, powershell)
            continue
        read += 1
        assert parsed(read_by_powershell(command(options, powershell))) == options
    assert read > 50


@pytest.mark.parametrize(
    ("word", "in_posix", "in_powershell"),
    [
        ("q_proj", "q_proj", "q_proj"),
        ("--bs", "--bs", "--bs"),
        ("4", "4", "4"),
        ("2k", "2k", "'2k'"),
        ("24GiB", "24GiB", "'24GiB'"),
        ("a,b", "a,b", "'a,b'"),
        ("@x", "@x", "'@x'"),
        ("", "''", "''"),
        ("RTX 4090", "'RTX 4090'", "'RTX 4090'"),
        ("$(id)", "'$(id)'", "'$(id)'"),
        ("a'b", "'a'\"'\"'b'", "'a''b'"),
        ("a\u2019; id", "'a\u2019; id'", "'a\u2019\u2019; id'"),
    ],
)
def test_words(word: str, in_posix: str, in_powershell: str) -> None:
    assert (posix(word), powershell(word)) == (in_posix, in_powershell)


def test_methods_have_the_flags_that_the_parser_knows() -> None:
    for name in METHOD_FLAGS:
        assert command({"method": name}) == f"estimate --{name}"
        assert PARSER.parse([f"--{name}"]) == {"method": [name]}


@pytest.mark.parametrize("name", ["llama;7b", "llama$7b", "gpt2 &"])
def test_a_model_in_place_of_a_command_is_priced(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--ctx", "128"]) == 0
    assert "parameters)" in capsys.readouterr().out


PLANNED = [
    "--arch",
    "L2 h64 a2 v256",
    "--lora",
    "--train-modules",
    "lm_head $(id) &`id` '",
    "--ctx",
    "64",
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", [["--gpu", "RTX 4090"], ["--gpus", "2xRTX 4090"]])
def test_the_line_that_a_plan_prints_asks_for_the_plan(
    machine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *PLANNED, *machine, "--bs", "1", "--checkpointing", "none"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    options = parsed(shlex.split(last.removeprefix("run it:")))
    assert (options["arch"], options["train_modules"]) == (PLANNED[1], PLANNED[4])
    assert options["method"] == "lora" and options["bs"] == "1"
    assert "RTX 4090" in str(options.get("gpu", options.get("gpus")))
    assert main(shlex.split(last.removeprefix("run it:"))[1:]) == 0
