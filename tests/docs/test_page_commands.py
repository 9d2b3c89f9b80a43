"""Every command and every Python block of the pages is run; what cannot be is marked with its
reason, and still parsed."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from docs.fenced_blocks import REASONS, Block, blocks_of, exit_code
from napkinmath.cli.main import COMMANDS, DEFAULT
from napkinmath.cli.parser import Parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "notebooks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page, ROOT)]
PARSE = Parser.parse
MOST_SECONDS = 120  # the longest, a plan, takes 3 on a core of its own
JOB = "model: llama-3.1-8b\nmethod: qlora\nbs: 1\nctx: 1k\n"
# What pages take for granted in the reader's folder.
PLACEHOLDERS = {
    "job.yaml": JOB,
    "my_axolotl_config.yaml": (
        "base_model: NousResearch/Llama-2-7b-hf\nadapter: qlora\nload_in_4bit: true\nsequence_len:"
        " 1024\nmicro_batch_size: 1\nlora_r: 8\nlora_target_linear: true\noptimizer:"
        " adamw_8bit\nbf16: true\ngradient_checkpointing: true\n"
    ),
    "jobs.jsonl": (
        '{"id": "a", "model": "llama-7b", "method": "lora", "bs": 4}\n{"id": "b", "model":'
        ' "llama-7b", "method": "qlora"}\n'
    ),
    "my_model/config.json": (
        '{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,'
        ' "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,'
        ' "num_hidden_layers": 22}'
    ),
    "message.txt": (
        "CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of 23.68 GiB"
        " of which 689.19 MiB is free."
    ),
}


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages take for granted, `estimate` and `python` of this
    environment on the path, and an empty cache."""
    for name, text in PLACEHOLDERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("estimate", "-m napkinmath "), ("python", "")):
        (programs / name).write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n', encoding="utf-8"
        )
        (programs / name).chmod(0o755)
    roots = [str(ROOT / folder) for folder in ("estimator", "profiler", "kernels")]
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(roots))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(language: str, *, runs: bool) -> list[Any]:
    return [
        pytest.param(b, id=b.place) for b in BLOCKS if b.language == language and b.runs is runs
    ]


@pytest.mark.parametrize("block", chosen("sh", runs=True))
def test_commands_run(block: Block, readers_folder: Path) -> None:
    for command in block.commands():
        folder = (
            ROOT if command.startswith(("python docs/", "python benchmarks/")) else readers_folder
        )
        try:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"{block.place}: {command} does not end; write '<!-- not run: REASON -->' above it,"
                f" one of {REASONS}"
            )
        assert done.returncode == exit_code(command), (
            f"{block.place}: {command}\n{done.stdout[-800:]}{done.stderr[-800:]}"
        )
        assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("block", chosen("python", runs=True))
def test_python_blocks_run(block: Block, readers_folder: Path) -> None:
    given = {name.strip() for name in block.said.get("given", "").split(",") if name.strip()}
    live = live_objects() if given else {}
    assert given <= set(live), f"{block.place}: {sorted(given - set(live))} cannot be given"
    exec(compile(block.text, block.place, "exec"), {name: live[name] for name in given})


def live_objects() -> dict[str, Any]:
    """What a page may take for granted of a training script: a tiny model on the CPU, in training
    mode, with its optimizer and a batch."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "num_hidden_layers": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    tokens = torch.zeros((2, 32), dtype=torch.long)
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": {"input_ids": tokens, "labels": tokens},
    }


@pytest.mark.parametrize("block", chosen("yaml", runs=False))
def test_job_files_of_the_pages_are_priced(block: Block, readers_folder: Path) -> None:
    (readers_folder / "shown.yaml").write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        ["estimate", "shown.yaml", "--json"],
        cwd=readers_folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1, 3), f"{block.place}: {done.stderr}"
    assert "ignored" not in done.stderr and "not priced" not in done.stderr, done.stderr


# ---------------------------------------------------------------- what is not run


@pytest.mark.parametrize("block", chosen("sh", runs=False))
def test_commands_not_run_are_understood(block: Block) -> None:
    assert block.said["not run"].startswith(REASONS), f"{block.place}: say why, one of {REASONS}"
    for command in block.commands():
        words = shlex.split(command.split(" || ")[0].split(" | ")[0], comments=True)
        if words[0] == "estimate":
            understood(words[1:])
        elif words[0] == "make":
            assert re.search(
                rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            ), command
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), command


@pytest.mark.parametrize("block", chosen("python", runs=False))
def test_python_blocks_not_run_import_what_is_there(block: Block) -> None:
    assert block.said["not run"].startswith(REASONS), f"{block.place}: say why, one of {REASONS}"
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("napkinmath"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), (
                    f"{block.place}: {node.module} has no {alias.name}"
                )


class Understood(BaseException):
    """A command has parsed its arguments; BaseException, so that nothing on the way takes it for an
    error."""


def understood(arguments: list[str]) -> None:
    """Fails unless a command understands its arguments; nothing of it runs."""

    def parse(parser: Parser, argv: Any) -> Any:
        PARSE(parser, argv)
        raise Understood

    known = bool(arguments) and arguments[0] in COMMANDS
    module, _, function = (COMMANDS[arguments[0]][0] if known else DEFAULT).partition(":")
    with patch.object(Parser, "parse", parse), pytest.raises(Understood):
        getattr(importlib.import_module(module), function)(arguments[1:] if known else arguments)


# ---------------------------------------------------------------- the test itself


def test_pages_have_blocks_of_every_kind() -> None:
    assert (
        len(chosen("sh", runs=True)) >= 5
        and chosen("python", runs=True)
        and chosen("sh", runs=False)
    )


def test_a_wrong_command_is_noticed(readers_folder: Path) -> None:
    page = readers_folder / "page.md"
    page.write_text(
        "```sh\nestimate --model llama-7b --no-such-flag\n```\n\n```sh\nestimate --model llama-7b"
        " --full --gpu t4  # exits 1: does not fit\n```\n"
    )
    wrong, does_not_fit = blocks_of(page, readers_folder)
    with pytest.raises(AssertionError, match="no-such-flag"):
        test_commands_run(wrong, readers_folder)
    test_commands_run(does_not_fit, readers_folder)
    with pytest.raises(Exception, match="no-such-flag"):
        understood(["--no-such-flag"])
