"""Several files are one run: flags before files, what is said before what a tool takes by itself,
each value with its line, and a finding where two files differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.cli.commands import COMMANDS
from napkinmath.config.job_keys import JobKeys
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.option_table import BY_KEY

JOBS = Path(__file__).parents[1] / "cli" / "jobs"
FILES = {
    "train.yaml": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 2\nmax_length: 512\n"
        "learning_rate: 1e-5\nuse_peft: true\nlora_r: 8\n"
    ),
    "plain.yaml": "model_name_or_path: llama-3.2-1b\nbf16: true\noptim: adamw_torch\n",
    "accelerate.yaml": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: fp16\n"
        "num_processes: 4\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: false\n"
    ),
    "gpus.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n",
    "ds.json": (
        '{"zero_optimization": {"stage": 3},\n "bf16": {"enabled": true},\n'
        ' "train_micro_batch_size_per_gpu": 4,\n "optimizer": {"type": "Lion"}}\n'
    ),
    "auto.json": (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"},'
        ' "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}'
    ),
    "names.yaml": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\ndeepspeed: ds.json\n"
    ),
    "ours.yaml": "bs: 16\nctx: 1k\n",
}
# Files and flags, options that follow, what two files differ in.
RUNS: list[tuple[list[str], dict[str, object], dict[str, object], list[str]]] = [
    (["train.yaml", "gpus.yaml"], {}, {"bs": 2, "gpus": 2, "precision": "bf16-checkpoint"}, []),
    (["gpus.yaml", "train.yaml"], {}, {"bs": 2, "gpus": 2, "precision": "bf16-checkpoint"}, []),
    (["train.yaml", "accelerate.yaml"], {}, {"precision": "fp16-amp", "gpus": 4}, []),
    (["plain.yaml", "accelerate.yaml"], {}, {"precision": "bf16-checkpoint"}, ["precision"]),
    (["plain.yaml", "ds.json"], {"gpus": "4"}, {"bs": 4, "gpus": "4"}, ["optimizer"]),
    (["train.yaml", "ds.json"], {"gpus": "4"}, {"bs": 2, "data_parallel": ["zero3"]}, ["bs"]),
    (["train.yaml", "ds.json"], {"gpus": "4", "bs": "8"}, {"bs": "8"}, ["bs"]),
    (["train.yaml", "auto.json"], {"gpus": "4"}, {"bs": 2, "data_parallel": ["zero2"]}, []),
    (["plain.yaml", "ds.json"], {"gpus": 4}, {"optimizer": "lion"}, ["optimizer"]),
    (["train.yaml", "ours.yaml"], {}, {"bs": 16, "ctx": "1k", "rank": 8}, ["bs", "ctx"]),
    (["ours.yaml", "train.yaml"], {}, {"bs": 16, "ctx": "1k", "rank": 8}, ["bs", "ctx"]),
    (
        ["train.yaml", "accelerate.yaml"],
        {"deepspeed": "auto.json"},
        {"data_parallel": ["zero2"], "gpus": 4},
        ["data_parallel"],
    ),
    (["train.yaml", "train.yaml"], {}, {"bs": 2}, []),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("files", "flags", "expected", "differing"), RUNS)
def test_files_and_flags_become_one_run(
    folder: Path,
    files: list[str],
    flags: dict[str, object],
    expected: dict[str, object],
    differing: list[str],
) -> None:
    options = with_job_file({**flags, "job": files}, [])
    assert {key: options[key] for key in expected} == expected
    keys = options.get("job_keys")
    found = keys.differing if isinstance(keys, JobKeys) else ()
    assert len(found) == len(differing), found
    for option, sentence in zip(differing, found, strict=True):
        assert BY_KEY[option].flag in sentence
    made = priced(options, [])[0]
    assert made.memory.device.value > 0
    texts = [finding.text for finding in made.findings]
    assert all(sentence in texts for sentence in found)


def test_every_option_has_an_origin_that_says_it(folder: Path) -> None:
    """The line that is named holds the key that is named, and a flag is told as one."""
    given = {"job": ["train.yaml", "accelerate.yaml", "ds.json"], "bs": "8", "explain": True}
    options = with_job_file(given, [])
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    told = {origin.option: origin for origin in keys.origins}
    assert set(told) == set(options) & set(BY_KEY) | {"zero_options"} & set(options)
    assert told["bs"].place == "command line"
    for origin in keys.origins:
        if origin.line:
            line = (folder / origin.file).read_text().splitlines()[origin.line - 1]
            assert origin.key.rpartition(".")[2] in line
    assert told["rank"].place == "train.yaml:6 (lora_r)"
    assert told["dropout"].line == 0 and "what its tool takes" in told["dropout"].place


@pytest.mark.parametrize("name", sorted(path.name for path in JOBS.iterdir()))
def test_origins_of_every_tool_are_on_their_lines(name: str) -> None:
    path = JOBS / name
    keys = with_job_file({"job": str(path), "explain": True}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    lines = path.read_text(encoding="utf-8").splitlines()
    said = [origin for origin in keys.origins if origin.line]
    assert len(said) >= 2, keys.origins
    for origin in said:
        last = origin.key.rpartition(".")[2].lower().replace("-", "_")
        assert last in lines[origin.line - 1].lower().replace("-", "_"), origin


def test_one_file_alone_is_read_as_before(folder: Path) -> None:
    alone = with_job_file({"job": "train.yaml"}, [])
    explained = with_job_file({"job": ["train.yaml"], "explain": True}, [])
    alone.pop("job_keys"), explained.pop("job_keys"), explained.pop("explain")
    assert alone == explained


def test_parameters_on_the_host_keep_stage_3_where_nobody_says_how_many_gpus(folder: Path) -> None:
    """axolotl's bigstral example: the answer of one GPU that holds all was a refusal of its
    offload."""
    (folder / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "sub_group_size": 0, "offload_param": {"device": "cpu"}},'
        ' "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}'
    )
    notes: list[str] = []
    found = priced(with_job_file({"job": str(folder / "names.yaml")}, notes), notes)[0]
    assert found.step.policy.config.offload.parameters
    assert any("does not say how many" in note for note in notes)


def test_explain_lists_option_value_file_and_line(folder: Path) -> None:
    done = run("train.yaml", "gpus.yaml", "--ctx", "256", "--explain")
    assert done.code == 0, done.err
    said = done.out.partition("symbols")[0]
    assert "rank = 8   train.yaml:6 (lora_r)" in said
    assert "gpus = 2   gpus.yaml:3 (num_processes)" in said
    assert "ctx = '256'   command line" in said
    assert "options" not in run("--model", "llama-3.2-1b", "--explain").out.splitlines()[0]


@pytest.mark.slow
def test_the_deepspeed_flag_stands_beside_plain_flags(folder: Path) -> None:
    done = run("--model", "llama-3.2-1b", "--gpus", "4", "--deepspeed", "ds.json")
    assert done.code == 0 and "zero3" in done.out.lower(), done.out
    for command in ("plan", "sweep"):
        done = run(command, "train.yaml", "gpus.yaml", "--bs", "1,2", "--gpu", "h100")
        assert done.code in (0, 1, 2, 3) and "left over" not in done.err, done.err
        assert "defect" not in done.err


@pytest.mark.parametrize("name", sorted(COMMANDS)[:3])
def test_a_command_that_is_a_file_too_is_asked_about(folder: Path, name: str) -> None:
    (folder / name).write_text("model: llama-3.2-1b\n")
    done = run(name)
    assert done.code == 2 and "is a command and a file" in done.err and f"./{name}" in done.err
    assert run(f"./{name}").code == 0


@pytest.mark.torch
def test_a_first_word_is_a_command_then_a_path_then_a_model(folder: Path) -> None:
    assert run("train.yaml").code == 0
    assert "llama-3.2-1b" in run("llama-3.2-1b", "--ctx", "256").out
    (folder / "llama-3.2-1b").write_text("model: gpt2\n")
    both = run("llama-3.2-1b")
    assert both.code == 2 and "a path here and a model" in both.err
    assert "--model llama-3.2-1b" in both.err and "./llama-3.2-1b" in both.err
    assert "gpt2" in run("./llama-3.2-1b").out
    (folder / "trace").mkdir()
    assert "is a command and" not in run("trace", "--help").err
    neither = run("llama-3.2-1bb")
    assert neither.code == 2 and "unknown" in neither.err


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        (("check",), ("--gpu", "l4")),
        (("sweep",), ("--gpu", "l4")),
        (("plan",), ("--gpu", "l4", "--full", "--bs", "1", "--top", "1")),
        ((), ("--bs", "2")),
    ],
)
def test_a_model_stands_without_its_flag_anywhere(
    folder: Path, command: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    named = run(*command, "--model", "gpt2", "--ctx", "64", *rest)
    assert named.code == 0 and named.out
    assert run(*command, "gpt2", "--ctx", "64", *rest).out == named.out
    assert run(*command, *rest, "gpt2", "--ctx", "64").out == named.out


def test_a_word_that_is_no_model_is_asked_about(folder: Path) -> None:
    near = run("check", "gtp2", "--gpu", "l4")
    assert near.code == 2 and "did you mean" in near.err and "gpt2" in near.err
    twice = run("check", "gpt2", "--model", "llama-7b", "--gpu", "l4")
    assert twice.code == 2 and "'gpt2'" in twice.err and "'llama-7b'" in twice.err
    assert run("check", "train.yaml", "--gpu", "l4").code == 0


def test_a_folder_with_a_model_is_a_model(folder: Path) -> None:
    model = folder / "mine"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers":'
        ' 2, "num_attention_heads": 4, "vocab_size": 99}'
    )
    assert "mine" in run("mine", "--ctx", "64").out


@pytest.mark.parametrize("files", [["train.yaml", "gone.yaml"], ["train.yaml", 3], [[]]])
def test_what_is_no_file_is_one_line(folder: Path, files: list[object]) -> None:
    with pytest.raises(InputError) as error:
        with_job_file({"job": files}, [])
    assert "\n" not in str(error.value)
