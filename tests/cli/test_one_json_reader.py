"""A key that a user's JSON gives twice is refused at every door, YAML's tags end in one line, and a
whole number may be written as 4.0."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.base.json_input import NotJson, loads
from napkinmath.config.lengths import read_lengths
from napkinmath.inputs import hub
from napkinmath.inputs.options import train_config
from napkinmath.serving.requests import options_of

ROOT = Path(__file__).resolve().parents[2]
# Readers of what this program wrote itself, and of its own data.
OWN_DATA = {
    "base/json_input.py": 1,
    "base/json_text.py": 1,
    "catalog/models.py": 1,
    "catalog/learned_forms.py": 1,  # what `estimate learn` wrote
    "planning/batch.py": 3,
    "triton_kernels/tile_choice.py": 1,  # its own choices; kernels import nothing of ours
    "planning/batch_lines.py": 1,  # a number or a string of a line that was read
}
TWICE = '{"zz": 1, "zz": 2}'


def refused(folder: Path, text: str, *words: str, name: str = "given.json") -> str:
    """What the command line says to a file with this text."""
    (folder / name).write_text(text)
    done = run(*(word.format(folder / name) for word in words))
    lines = [line for line in done.err.splitlines() if line.startswith("estimate: ")]
    assert done.code == 2 and len(lines) == 1, done
    return lines[0]


def batch_reason(folder: Path, line: str) -> str:
    (folder / "jobs.jsonl").write_text(line + "\n")
    assert run("batch", str(folder / "jobs.jsonl"), "--out", str(folder / "out")).code == 2
    return json.loads((folder / "out.bad.jsonl").read_text())["reason"]


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def hub_reason(_: Path, text: str) -> str:
    original = hub._fetch
    hub._fetch = lambda *_: text  # pyright: ignore[reportPrivateUsage]
    try:
        return raised(lambda: hub.fetch_config("org/name"))
    finally:
        hub._fetch = original


def with_deepspeed(folder: Path, text: str) -> str:
    (folder / "ds.json").write_text(text)
    job = "model_name_or_path: gpt2\noutput_dir: x\nper_device_train_batch_size: 1\n"
    return refused(folder, f"{job}deepspeed: {folder}/ds.json\n", "{}", name="job.yaml")


def lengths_reason(folder: Path, text: str) -> str:
    (folder / "lengths.jsonl").write_text(text)
    return raised(lambda: read_lengths(str(folder / "lengths.jsonl")))


DOORS: dict[str, Callable[[Path, str], str]] = {
    "config.json": lambda folder, text: refused(folder, text, "--model", "{}"),
    "job file": lambda folder, text: refused(folder, text, "{}"),
    "DeepSpeed file": with_deepspeed,
    "calibration": lambda folder, text: refused(
        folder, text, "--model", "gpt2", "--gpu", "H100", "--calibration", "{}"
    ),
    "calibration shown": lambda folder, text: refused(folder, text, "calibration", "show", "{}"),
    "batch line": batch_reason,
    "lengths": lengths_reason,
    "request of the page": lambda _, text: raised(lambda: options_of(text.encode())),
    "config of the hub": hub_reason,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWICE, "gives the key 'zz' twice; keep one"),
        (f'{{"deep": [{{"er": {TWICE}}}]}}', "gives the key 'zz' twice; keep one"),
        ('{"bs": 1, "bs": 1}', "gives the key 'bs' twice; keep one"),
        ('{"a": 1', "is not valid JSON: "),
        ('{"a": ' + "9" * 5000 + "}", "holds a number that cannot be read"),
        ('{"a":' * 3_000 + "1" + "}" * 3_000, "is nested too deeply"),
        (f'{{"a": {"[" * 70}{"]" * 70}}}', "is nested too deeply"),
    ],
    ids=["twice", "twice below", "equal", "broken", "long number", "deep", "deep lists"],
)
def test_every_door_refuses_what_one_reader_refuses(
    tmp_path: Path, door: str, text: str, words: str
) -> None:
    said = DOORS[door](tmp_path, text)
    assert words in said and "\n" not in said.strip()


@pytest.mark.slow
@pytest.mark.parametrize("root", ["estimator", "profiler", "kernels"])
def test_there_is_one_reader(root: str) -> None:
    for path in sorted((ROOT / root).rglob("*.py")):
        calls = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("load", "loads")
            and getattr(node.func.value, "id", "") == "json"
        ]
        name = "/".join(path.parts[-2:])
        said = f"{path}, lines {calls}: read a user's JSON with base.json_input.loads"
        dumped = sum("json.loads(json.dumps(" in line for line in path.read_text().splitlines())
        assert len(calls) - dumped <= OWN_DATA.get(name, 0), said


@pytest.mark.parametrize("text", ["", "nul", "[1,]", "\ud800".encode("utf-8", "surrogatepass")])
def test_the_reason_is_a_sentence(text: str | bytes) -> None:
    with pytest.raises(NotJson, match=r"^(is not|holds|gives)[^\n]*; "):
        loads(text)


# ---------------------------------------------------------------- YAML's tags


@pytest.mark.parametrize(
    "value",
    [
        "!!str 3",
        '!!int "3"',
        "!!bool 3",
        "!!float x",
        "!!null x",
        "!!timestamp 2020-99-99",
        "!!timestamp x",
        "!!binary ///",
        "!!set {a, b}",
        "!!omap [a: 1]",
        "!!seq x",
        "!!map [1]",
        "!!merge x",
        "!!value x",
        "!!python/object/apply:os.system [id]",
        "!own 3",
        "! 3",
        "!<tag:yaml.org,2002:int> 3",
        "!<tag:yaml.org,2002:timestamp> 3",
    ],
)
@pytest.mark.parametrize("place", ["bs: {}", "{}: 4", "- {}", "lora: [{}]", "x: {{y: {}}}"])
def test_a_tag_is_one_line(tmp_path: Path, value: str, place: str) -> None:
    text = f"model: gpt2\n{place.format(value)}\n" if place[0] != "-" else place.format(value)
    said = refused(tmp_path, text, "{}", name="job.yaml")
    assert "tag" in said or "not plain YAML" in said
    assert "job.yaml" in said and "line" in said


@pytest.mark.parametrize("value", ["2020-99-99", "0o9", "0x", ".", "-", "=", "<<", "1:99:99"])
def test_what_only_looks_like_a_value_is_one_line(tmp_path: Path, value: str) -> None:
    said = refused(tmp_path, f"model: gpt2\nbs: {value}\n", "{}", name="job.yaml")
    assert len(said) < 400


# ---------------------------------------------------------------- 4.0


def test_lengths_may_be_written_as_floats(tmp_path: Path) -> None:
    for text in ("5.0 7 9.0", "[5.0, 7, 9.0]", '{"length": 5.0}\n{"length": 7}\n{"length": 9.0}'):
        (tmp_path / "lengths").write_text(text)
        assert read_lengths(str(tmp_path / "lengths")) == (5, 7, 9)
    for text in ("5.5", "nan", "inf", "0.0", "1e99", '{"length": true}', '{"length": "x"}'):
        (tmp_path / "lengths").write_text(text)
        with pytest.raises(InputError, match="which is no length"):
            read_lengths(str(tmp_path / "lengths"))


@pytest.mark.parametrize("option", ["bs", "ctx", "grad_accum", "rank"])
def test_an_option_may_be_written_as_a_float(option: str) -> None:
    base = {"method": "lora"} if option == "rank" else {}
    assert train_config({**base, option: 4.0}) == train_config({**base, option: 4})
    with pytest.raises(InputError):
        train_config({**base, option: 4.5})


@pytest.mark.parametrize("number", ["2", "2.0"])
@pytest.mark.parametrize(
    "file",
    [
        "model_name_or_path: gpt2\nquantization_bit: 8{}\nstage: sft\nfinetuning_type: lora\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: {n}\n"
        "deepspeed_config:\n  zero_stage: {n}\n  gradient_accumulation_steps: {n}\n",
        '{{"zero_optimization": {{"stage": {n}}}, "train_micro_batch_size_per_gpu": {n},'
        ' "gradient_accumulation_steps": {n}}}',
    ],
    ids=["LLaMA-Factory", "accelerate", "DeepSpeed"],
)
def test_files_of_other_tools_may_write_floats(tmp_path: Path, file: str, number: str) -> None:
    name = "job.json" if file.startswith("{{") else "job.yaml"
    (tmp_path / name).write_text(file.format(number[1:], n=number))
    done = run(str(tmp_path / name), "--model", "gpt2", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    (tmp_path / name).write_text(file.format("", n="2"))
    assert found == json.loads(run(str(tmp_path / name), "--model", "gpt2", "--json").out)


def test_a_config_may_write_floats(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    answers = []
    for kind in (int, float):
        numbers = {k: v if k == "model_type" else kind(v) for k, v in config.items()}  # type: ignore[call-overload]
        (tmp_path / "config.json").write_text(json.dumps(numbers))
        answers.append(run("--model", str(tmp_path / "config.json"), "--ctx", "64", "--json").out)
    assert answers[0] == answers[1] and answers[0]
