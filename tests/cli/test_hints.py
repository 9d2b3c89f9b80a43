"""Every hint that a message gives can be typed: its flags are those of the command that says it, a
command in backticks parses, and what it says to install is a package that we depend on."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import napkinmath
import pytest
from napkinmath.answers.changes import CANDIDATES, on_model
from napkinmath.answers.remedies import LEVELS
from napkinmath.base.errors import InputError
from napkinmath.base.installing import EXTRAS
from napkinmath.cli.commands import COMMANDS, DEFAULT
from napkinmath.cli.completion import flags_by_command
from napkinmath.cli.edited import CommandLine
from napkinmath.cli.estimate_command import _parser, make_estimates
from napkinmath.cli.flags import parsed
from napkinmath.cli.main import main
from napkinmath.cli.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(napkinmath.__file__).parent
ROOT = SOURCE.parent.parent
ROOMS = ("estimator", "profiler", "kernels")
MODULES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
# Modules that other commands than the estimate reach, and those commands; what is not here is
# reached by the estimate, and cli/X.py by its own command.
SAID_BY: dict[str, tuple[str, ...]] = {
    "report/drawing.py": ("sweep", "plan"),
    "serving/static_page.py": ("page",),
    "answers/generation.py": ("generate",),
    "answers/generation_config.py": ("generate",),
    "planning/batch.py": ("batch",),
    "planning/plan.py": ("plan",),
    "planning/plan_cluster.py": ("plan",),
    "planning/search.py": ("plan",),
    "planning/space.py": ("plan",),
    "cli/plan_cluster.py": ("plan",),
    "report/grid_files.py": ("sweep", "plan"),
    "report/grid_plot.py": ("sweep",),
    "report/links_plot.py": ("links",),
    "report/plot.py": ("",),
    "cli/doctor.py": ("",),  # it says what to run next
}
# Whose words these are: other programs' flags, and parts of a flag that code puts together.
OTHERS = {
    *(f"inputs/scripts/{name}.py" for name in ("launch", "launchers")),
    "inputs/megatron.py",
    "inputs/megatron_model.py",
    "cli/parser.py",
    "cli/completion.py",
}
FLAG = re.compile(r"(?<![\w{}-])--[a-z][a-z0-9-]*[a-z0-9]")
INSTALLED_ELSEWHERE = {"pyyaml", "pyarrow", "tomli"}  # for one file format, in no extra


@cache
def texts(module: str) -> list[tuple[int, str]]:
    return list(strings(module))


def strings(module: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of a module that is no docstring; {} stands for what is filled
    in."""
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    left = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left |= {id(value) for value in node.values}
    for node in ast.walk(tree):
        if id(node) in left:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@cache
def flags(command: str) -> frozenset[str]:
    return frozenset(flags_by_command()[command])


def commands_of(module: str) -> tuple[str, ...]:
    own = [
        name
        for name, (target, _) in COMMANDS.items()
        if target.partition(":")[0] == "napkinmath." + module[:-3].replace("/", ".")
    ]
    return SAID_BY.get(module) or tuple(own) or ("",)


@pytest.mark.parametrize("module", [module for module in MODULES if module not in OTHERS])
def test_a_flag_is_one_of_the_command_that_names_it(module: str) -> None:
    for line, text in texts(module):
        for flag in FLAG.findall(text) if " " in text else ():
            plain = flag.replace("--no-", "--", 1)
            named = re.search(rf"estimate ([a-z]+)[^;`]*{re.escape(flag)}", text)
            command = named[1] if named and named[1] in COMMANDS else None
            if command is not None and not COMMANDS[command][0].startswith("napkinmath."):
                continue  # the profiler's commands have tests of their own
            for one in (command,) if command is not None else commands_of(module):
                assert {flag, plain} & flags(one), f"{module}:{line}: {one or 'estimate'} {flag}"


def command_lines() -> list[tuple[str, str]]:
    found = [
        (f"{module}:{line}", words)
        for module in MODULES
        for line, text in texts(module)
        for words in re.findall(r"`(estimate\b[^`]*)`", text)
    ]
    assert len(found) > 10  # else the search is at fault
    return found


@pytest.mark.parametrize(("where", "words"), command_lines())
def test_a_command_in_backticks_parses(
    where: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to what it would do: the parser takes every word of it."""
    _, *rest = words.partition(" || ")[0].replace("{}", "x").split()
    name = rest[0] if rest and not rest[0].startswith("-") else ""
    if name.isupper() or name in ("", "x", "x.yaml", "JOB.yaml"):
        name = ""
    else:
        assert name in COMMANDS, where
        if not COMMANDS[name][0].startswith("napkinmath."):
            return  # the profiler is not installed everywhere
    taken: list[object] = []
    real = Parser.parse

    def parse(parser: Parser, argv: list[str]) -> dict[str, object]:
        taken.append(real(parser, argv))
        raise SystemExit(0)

    monkeypatch.setattr(Parser, "parse", parse)
    module, _, function = (COMMANDS[name][0] if name else DEFAULT).partition(":")
    run = getattr(__import__(module, fromlist=[function]), function)
    with pytest.raises(SystemExit):
        run(rest[1:] if name else rest)
    assert taken or "--help" in rest, where


def packages_of(extra: str) -> set[str]:
    """The names of an extra in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = re.search(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
    assert line is not None
    return {re.split(r"[^A-Za-z0-9_-]", one)[0] for one in re.findall(r'"([^"]+)"', line[1])}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_to_be_installed_is_what_the_extra_needs(extra: str) -> None:
    assert set(EXTRAS[extra].split()) == packages_of(extra)


def test_an_installation_is_said_by_packages_that_pip_finds_from_a_checkout_too() -> None:
    """In the profiler and the kernels too."""
    known = {"numpy", "trl", "liger-kernel", *INSTALLED_ELSEWHERE}.union(
        *(packages.split() for packages in EXTRAS.values())
    )
    for file in (f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))):
        for line, text in strings(str(file)):
            for words in re.findall(r"pip install '?([^;:,.(){}`=']*)", text):
                assert set(words.split()) <= known, f"{file}:{line}: {words}"


# ---------------------------------------------------------------- hints, followed


def test_the_hint_of_an_existing_timeline_file_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.svg"
    argv = ["--model", "tinyllama-1.1b", "--ctx", "64", "--timeline", str(path)]
    assert main(argv) == 0
    assert main(argv) == 2
    assert "add --force" in capsys.readouterr().err
    assert main([*argv, "--force"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama-7b", "mamba-130m", "bert-base"])
@pytest.mark.parametrize("keep", ["selective", "selective:nothing"])
def test_the_hint_of_selective_checkpointing_works(
    model: str, keep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", model, "--ctx", "64", "--attention", "eager", "--checkpointing"]
    if main([*argv, keep]) == 0:
        assert keep == "selective"
        return
    said = capsys.readouterr().err
    ways = re.findall(r"--checkpointing ([\w:]+)", said)
    assert ways, said
    for way in ways:
        assert main([*argv, way]) == 0, (said, way)


# ---------------------------------------------------------------- flags in a command that was typed

# Every spelling of what a hint replaces; @job.yaml stands for a file.
TYPED = [
    "gpt2 --gpu t4 -b 64 --global-batch 64 --optimizer adamw --eval --checkpointing full",
    "gpt2 --full --gpu t4 --batch-size=8 --attention=eager --loss hf --eval",
    "--model gpt2 --lora --gpu t4 --micro-batch-size 8 --gradient-accumulation-steps 2",
    "--model qwen3-0.6b --method lora --gpus 4xt4 --ddp --bs=8 --adapter-dtype=fp32 --dropout 0.1",
    "--model qwen3-0.6b --qlora --gpus 4xt4 --data-parallel ddp --bs=8 --no-double-quant",
    "--model qwen3-0.6b --full --gpus 2xt4 --zero 2 --bs=8 --offload optimizer",
    "--model qwen3-0.6b --gpu t4 --bs=8 --gradient-clipping --optimizer=adamw-foreach -s 4k",
    "--model gpt2 --workload grpo --gpu t4 --bs 8 --completion 512",
    "@job.yaml --gpu t4",
    "@job.yaml --gpu t4 -b 16",
    "--gpu t4 -- torchrun train.py --model_name_or_path gpt2 --per_device_train_batch_size 8",
]
JOB = "model: gpt2\nmethod: full\nmicro_batch_size: 8\nglobal_batch: 16\ncheckpointing: none\n"


def typed(line: str, folder: Path) -> CommandLine:
    (folder / "job.yaml").write_text(JOB)
    words = line.replace("@job.yaml", str(folder / "job.yaml")).split()
    return CommandLine(_parser(), words)


@pytest.mark.slow
@pytest.mark.parametrize("line", TYPED)
def test_a_hint_put_into_a_command_prices_what_it_says(line: str, tmp_path: Path) -> None:
    command = typed(line, tmp_path)
    e = make_estimates(parsed(command.parser, list(command.argv)), [])[0]
    tried = 0
    for candidate in dict.fromkeys(on_model(e, (*CANDIDATES, *LEVELS[-1]))):
        changed = candidate.apply(e.config)
        try:
            if changed is None or e.compared(changed)[0] <= 0:
                continue
        except InputError:
            continue
        sizes = {"bs": changed.micro_batch_size, "accum": changed.gradient_accumulation_steps}
        words, _ = command.with_flags(candidate.flag.format(**sizes).split())
        found = make_estimates(parsed(command.parser, words), [])[0]
        assert found.config == changed, (candidate.flag, words)
        tried += 1
    assert tried


@pytest.mark.parametrize(
    ("line", "flags", "whole", "replaced"),
    [
        ("gpt2 -b 8", ["--bs 4 --grad-accum 2"], "gpt2 --bs 4 --grad-accum 2", "-b 8"),
        ("gpt2 --full --bs=8", ["--lora", "--bs 1"], "gpt2 --lora --bs 1", "--full, --bs=8"),
        ("gpt2 --timeline a.svg -b 2", ["--bs 1"], "gpt2 --bs 1", "-b 2"),
        ("gpt2 --eval", ["--train-mode"], "gpt2 --train-mode", "--eval"),
        ("-b 2 -- python t.py -b 2", ["--bs 1"], "--bs 1 -- python t.py -b 2", "-b 2"),
        ("--global-batch 8 'my model'", ["--grad-accum 2"], "'my model' --grad-accum 2", "--global-batch 8"),
        ("gpt2", ["--lora"], "", ""),
    ],
)  # fmt: skip
def test_what_flags_replace_is_left_out_and_said(
    line: str, flags: list[str], whole: str, replaced: str
) -> None:
    found, said = CommandLine(_parser(), shlex.split(line)).over(flags)
    assert (found.removeprefix("estimate "), said) == (whole, replaced)


def test_a_command_for_one_of_several_gpus_names_it() -> None:
    line = CommandLine(_parser(), shlex.split("gpt2 --full --gpu t4 --gpu 'RTX 4090'"))
    assert line.over(["--lora"], gpu="RTX 4090")[0] == "estimate gpt2 --lora --gpu 'RTX 4090'"
