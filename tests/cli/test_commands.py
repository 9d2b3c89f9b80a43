"""The commands end to end: exit codes, output forms, catalogs, streams that break."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import napkinmath
import pytest
from cli.runs import TINY, run
from napkinmath.cli import main as main_module
from napkinmath.cli.main import COMMANDS, PARSERS, main
from napkinmath.estimate import Verdict
from napkinmath.inputs.jobs import priced

ROOT = Path(__file__).resolve().parents[2]
CODE = "from napkinmath.cli.main import entry; entry()"


def test_report_of_the_readme_command() -> None:
    done = run("--model", "llama-7b", "--qlora", "--bs", "4", "--ctx", "2048")
    assert done.code == 0 and done.err == ""
    for word in ("llama-7b", "QLoRA", "allocated", "reserved", "device", "peak"):
        assert word in done.out


@pytest.mark.parametrize(
    ("word", "what"),
    [("foo/bar", "model"), ("foo/bar.yaml", "job file"), ("a/b/c", "job file")],
)
def test_word_that_is_no_file_is_a_hub_id_or_a_path(word: str, what: str) -> None:
    done = run(word)
    assert done.code == 2 and done.err.startswith(f"estimate: {what} '{word}'")


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "code"), [("H200", 0), ("T4", 1)])
def test_exit_code_says_whether_it_fits(gpu: str, code: int) -> None:
    assert run("--model", "llama-7b", "--lora", "--bs", "4", "--gpu", gpu).code == code


@pytest.mark.slow
def test_worst_of_several_gpus_decides() -> None:
    assert run("--model", "llama-7b", "--lora", "--gpu", "H200", "--gpu", "T4", "--json").code == 1


@pytest.mark.slow
def test_straddled_capacity_cannot_be_told() -> None:
    """Between the least memory that surely fits and the most that surely does not lies a band of
    exit code 3."""
    asked = {"model": "llama-7b", "method": "qlora", "bs": 4}
    sizes = [f"{mib}MiB" for mib in range(11 * 1024, 18 * 1024, 700)]
    said = [priced({**asked, "vram": size}, [])[0].verdict for size in sizes]
    order = [Verdict.DOES_NOT_FIT, Verdict.UNKNOWN, Verdict.FITS]
    assert said == sorted(said, key=order.index) and set(said) == set(order)
    argv = ("--model", "llama-7b", "--qlora", "--bs", "4", "--json", "--vram")
    codes = {verdict: run(*argv, sizes[said.index(verdict)]).code for verdict in order}
    assert list(codes.values()) == [1, 3, 0]


def test_json_is_one_document() -> None:
    done = run(*TINY, "--lora", "--gpu", "4090", "--json")
    assert done.code == 0 and isinstance(json.loads(done.out), dict)


def test_explain_prints_formulas() -> None:
    done = run(*TINY, "--lora", "--explain")
    assert done.code == 0 and "b" in done.out and "·" in done.out


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_timeline_is_written(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"step.{ending}"
    done = run(*TINY, "--timeline", str(file))
    assert done.code == 0 and str(file) in done.out
    assert f"<{ending}" in file.read_text(encoding="utf-8")


def test_timeline_into_a_missing_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*TINY, "--timeline", "no/step.svg")
    assert done.code == 2 and len(done.err.splitlines()) == 1 and "no/step.svg" in done.err


def test_models_and_gpus_are_listed_and_filtered() -> None:
    everything, some = run("models"), run("models", "qwen", "moe")
    assert everything.code == some.code == 0
    assert len(everything.out.splitlines()) > 120 and 1 < len(some.out.splitlines()) < 20
    assert all("qwen" in line.lower() for line in some.out.splitlines()[1:])
    assert len(run("gpus").out.splitlines()) > 50
    assert {row["vendor"] for row in json.loads(run("gpus", "--json", "amd").out)} == {"amd"}
    assert all(
        row["nominal_bytes"] >= 80 * 2**30
        for row in json.loads(run("gpus", "--json", "--min-memory", "80").out)
    )
    assert len(json.loads(run("models", "--json", "llama").out)) > 5


def test_a_misspelt_model_of_the_list_is_helped() -> None:
    done = run("models", "qwenn")
    assert done.code == 2 and "did you mean qwen" in done.err


@pytest.mark.parametrize("command", ["", "generate", "sweep"])
def test_a_price_may_have_its_currency_sign(command: str) -> None:
    flags = ("--model", "gpt2", "--gpu", "h100", "--json", "--price")
    named = [command] if command else []
    assert run(*named, *flags, "$2.5").out == run(*named, *flags, "2.5").out != ""


def test_tokens_of_rollouts_are_said_to_do_nothing_without_any() -> None:
    line = ("gpt2", "--ctx", "64", "--completion", "5")
    assert "--completion 5 has no effect" in run(*line).err
    assert "no effect" not in run(*line, "--workload", "grpo").err


def test_version_is_the_package_s() -> None:
    done = run("version")
    assert done.code == 0 and napkinmath.__version__ in done.out
    assert f'version = "{napkinmath.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "argv", [("--help",), ("models", "--help"), ("gpus", "-h"), ("version", "--help")]
)
def test_help(argv: tuple[str, ...]) -> None:
    done = run(*argv)
    assert done.code == 0 and done.out.startswith("usage: estimate") and done.err == ""


def test_help_names_the_commands_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "plan", ("napkinmath.cli.no_such_module:run", ""))
    text = run("--help", "all").out
    assert all(f"  {name} " in text for name in ("models", "gpus", "version"))
    assert "  plan " not in text
    assert " plan " not in run("--help").out.partition("commands")[2]


def test_help_fits_a_screen_and_all_of_it_is_a_word_more() -> None:
    from napkinmath.cli.flags import SHARED

    short, whole = run("--help").out, run("--help", "all").out
    assert 24 <= len(short.splitlines()) <= 40 and max(map(len, short.splitlines())) <= 80
    assert run("-h").out == run("--model", "gpt2", "--help").out == short
    flags = [name for _, rows in SHARED for row in rows for name in row[0]]
    assert [flag for flag in flags if flag not in whole] == []
    named = re.findall(r"(?<!\S)(--[a-z][a-z-]+)", short)
    assert named and set(named) <= {*flags, "--open", "--help", "--json"}


def test_nothing_asked_gives_five_examples_that_are_understood() -> None:
    from napkinmath.cli.start import EXAMPLES

    done = run()
    assert (done.code, done.err) == (0, "") and len(EXAMPLES) == 5
    assert all(example in done.out for example, _ in EXAMPLES)
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_a_flag_too(flag: str) -> None:
    assert run(flag) == run("version")


@pytest.mark.parametrize("name", PARSERS)
def test_help_of_a_command_of_the_profiler_needs_no_torch(name: str) -> None:
    code = (
        "import sys; from napkinmath.cli.main import main; code = main(sys.argv[1:]);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith(f"usage: estimate {name}")
    flags = ("out", "force") if name == "learn" else ("model", "qlora")
    assert all(f"--{key}" in done.stdout for key in flags)


def test_command_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "sweep", ("napkinmath.cli.no_such_module:run", ""))
    done = run("sweep")
    assert (done.code, len(done.err.splitlines())) == (
        2,
        1,
    ) and "'sweep' is not part of this installation" in done.err


def test_command_that_needs_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "napkinmath_profiler_stub"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "trace.py").write_text("import a_library_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(COMMANDS, "trace", ("napkinmath_profiler_stub.trace:run", ""))
    monkeypatch.setitem(main_module.EXTRAS, "napkinmath_profiler_stub", "profiler")
    done = run("trace")
    assert (
        done.code == 2
        and "a_library_nobody_has" in done.err
        and "pip install torch transformers" in done.err
    )


@pytest.mark.parametrize(
    "argv", ["plan --gpu t4", "sweep --bs 1..400:1", "batch jobs.jsonl --out answers.jsonl"]
)
def test_without_numpy_one_line_says_so(argv: str, tmp_path: Path) -> None:
    """In a process of its own, since numpy is loaded here."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy', name='numpy')\n")
    (tmp_path / "jobs.jsonl").write_text('{"model": "gpt2"}\n')
    command = [
        sys.executable,
        "-m",
        "napkinmath",
        *argv.split(),
        *(() if argv.startswith("batch") else TINY),
    ]
    paths = os.pathsep.join([str(tmp_path), str(Path(main_module.__file__).parents[2])])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert (
        done.returncode == 2
        and len(done.stderr.splitlines()) == 1
        and "pip install numpy" in done.stderr
    )


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("napkinmath.cli.version.run", interrupted)
    assert run("version") == (130, "", "")


def test_an_interrupt_at_the_ends_of_the_program_is_quiet_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    codes: list[int] = []
    monkeypatch.setattr(main_module, "main", interrupted)
    monkeypatch.setattr(os, "_exit", codes.append)
    main_module.entry()
    assert codes == [main_module.INTERRUPTED]


def test_our_own_mistake_is_not_called_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise TypeError("oops")

    monkeypatch.setattr("napkinmath.cli.version.run", broken)
    done = run("version")
    assert (
        done.code == main_module.DEFECT
        and "TypeError: oops" in done.err
        and len(done.err.splitlines()) == 1
    )


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of shell in which `estimate` is the command of this checkout."""
    function = f"estimate() {{ {sys.executable} -c '{CODE}' \"$@\"; }}; "
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "estimator"), **environment}
    return subprocess.run(
        ["bash", "-c", function + line], capture_output=True, text=True, env=variables, timeout=60
    )


def test_reader_that_stops_reading() -> None:
    done = shell("estimate models | head -1; echo ${PIPESTATUS[0]}")
    assert done.stderr == "" and done.stdout.splitlines()[-1] == "0"


def test_closed_standard_output() -> None:
    done = shell("estimate --model llama-7b >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_standard_error() -> None:
    assert shell("estimate --model lama-9 2>&-").returncode == 2


def test_full_disk() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    done = shell("estimate --model llama-7b > /dev/full")
    assert (
        done.returncode == 2
        and len(done.stderr.splitlines()) == 1
        and "No space left" in done.stderr
    )


def test_terminal_without_unicode() -> None:
    done = shell(
        "estimate --model llama-7b --lora; estimate --model 模型",
        PYTHONIOENCODING="ascii:strict",
        PYTHONUTF8="0",
        LC_ALL="C",
    )
    assert (
        "llama-7b" in done.stdout
        and "Traceback" not in done.stderr
        and len(done.stderr.splitlines()) == 1
    )


def test_notes_go_to_standard_error(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("base_model: meta-llama/Llama-2-7b-hf\nadapter: lora\nfoo_bar: 3\n")
    done = run(str(job), "--json")
    assert done.code == 0 and json.loads(done.out)
    assert any("foo_bar" in line for line in done.err.splitlines()) and all(
        line.startswith("note: ") for line in done.err.splitlines()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("densenet121 --gpu v100", "model 'densenet121' is unknown"),
        ("llama-3.1-8bb", "did you mean llama-3.1-8b,"),
        ("paln llama-7b", "command 'paln' is unknown; did you mean plan"),
    ],
)
def test_an_unknown_word_is_a_model_unless_it_is_like_a_command(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "plan"]) == 0
    assert capsys.readouterr().out.startswith("usage: estimate plan")
