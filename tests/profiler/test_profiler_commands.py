"""The commands a person types: trace, allocator, oom, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from napkinmath.base.errors import InputError
from napkinmath.cli.main import main
from napkinmath.inputs.jobs import priced
from napkinmath_profiler.cli.trace import make_report
from napkinmath_profiler.measuring.comparison import compare, module_group
from napkinmath_profiler.snapshot.oom_message import read_message
from napkinmath_profiler.trace import trace_config
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from profiler.traced_families import FAMILIES

GIB, MIB = 1 << 30, 1 << 20
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total"
    " capacity of 23.65 GiB of which 615.06 MiB is free. Process 77 has 1.50 GiB memory in use."
    " Including non-PyTorch memory, this process has 21.50 GiB memory in use. Of the allocated"
    " memory 17.81 GiB is allocated by PyTorch, and 3.20 GiB is reserved by PyTorch but"
    " unallocated. If reserved but unallocated memory is large try ..."
)
OLD_MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity;"
    " 13.00 GiB already allocated; 1.20 GiB free; 13.50 GiB reserved in total by PyTorch)"
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**FAMILIES["llama"], "num_hidden_layers": 8}))
    return str(file)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code
    return capsys.readouterr().out


def test_trace_reports_what_a_person_asks_first(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(
        capsys,
        "trace",
        "--model",
        model,
        "--full",
        "--ctx",
        "64",
        "--stack",
        "hf-bare",
        "--precision",
        "bf16",
    )
    for part in (
        "traced",
        "memory",
        "peak at",
        "kept for the backward",
        "one step",
        "as on CUDA",
        "2 layers written out",
        "torch ",
    ):
        assert part in text


def test_trace_as_json_is_the_trace(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(
        output_of(
            capsys,
            "trace",
            "--model",
            model,
            "--lora",
            "--ctx",
            "64",
            "--precision",
            "bf16",
            "--json",
        )
    )
    assert (
        sum(document["roles_at_peak"].values())
        == document["memory"]["requested"]
        == document["peak"]["requested"]
    )
    assert (
        document["memory"]["requested"]
        <= document["memory"]["allocated"]
        <= document["memory"]["reserved"]
    )
    assert document["versions"]["torch"]


def test_trace_says_that_checkpointing_does_nothing_in_eval_mode(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(
        capsys,
        "trace",
        "--model",
        model,
        "--ctx",
        "512",
        "--checkpointing",
        "full",
        "--eval",
        "--precision",
        "bf16",
    )
    assert "checkpointing is requested but the model is in eval mode" in text


@pytest.mark.parametrize(
    ("method", "checkpointing"), [("full", "none"), ("lora", "none"), ("qlora", "full")]
)
def test_a_gpu_without_bf16_is_traced_in_the_fp16_that_is_priced(
    model: str, method: str, checkpointing: str
) -> None:
    """Adapters in fp32 over fp16 under autocast and a gradient scaler could not be traced."""
    options = {"model": model, "method": method, "checkpointing": checkpointing}
    options = {**options, "gpu": "T4", "ctx": 128, "bs": 2}
    e = priced(options, [])[0]
    traced = make_report(options, e.hardware)
    assert e.peak.nbytes == pytest.approx(traced.timeline.peak().nbytes, rel=0.002)


def test_adapters_in_fp16_are_refused_as_their_scaler_refuses_them(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--lora", "--adapter-dtype", "base", "--precision", "fp16-autocast"]
    assert main(["trace", "--model", model, "--ctx", "64", *arguments]) == 2
    assert "trace --precision fp16-autocast --adapter-dtype fp32" in capsys.readouterr().err


def test_trace_exits_with_the_verdict(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "FITS" in output_of(capsys, "trace", "--model", model, "--ctx", "64", "--gpu", "T4")
    output_of(
        capsys,
        "trace",
        "--model",
        model,
        "--ctx",
        "64",
        "--bs",
        "100000",
        "--vram",
        "16GiB",
        code=1,
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--precision", "fp8"), "fp8"),
        (("--optimizer", "lomo"), "cannot be traced"),
        (("--method", "ia3"), "live module"),
        (("--qlora", "--quant", "gptq-int4"), "gptq"),
    ],
)
def test_what_cannot_be_traced_is_said_in_one_line(
    model: str, arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--model", model, *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1


def test_allocator_replays_a_snapshot(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(tmp_path / "step.pickle")
    output_of(capsys, "trace", "--model", model, "--ctx", "64", "--snapshot", snapshot)
    document = json.loads(
        output_of(
            capsys,
            "allocator",
            snapshot,
            "--conf",
            "expandable_segments:True",
            "--conf",
            "",
            "--json",
        )
    )
    assert document["settings"]["default"]["peak_reserved"] == document["recorded"]["reserved_peak"]
    assert "expandable_segments:True" in document["settings"]
    output_of(capsys, "allocator", snapshot, "--vram", "1MiB", code=1)
    alone = output_of(capsys, "allocator", snapshot, "--conf", "max_split_size_mb:128")
    assert "\ndefault " in alone and alone.rstrip().endswith("less than the default")


def test_a_trace_keeps_to_learned_positions() -> None:
    from napkinmath_profiler.cli.trace import within_positions

    notes: list[str] = []
    assert (
        within_positions({"model": "gpt2"}, notes)["ctx"] == 1024
        and "learned positions for no more" in notes[0]
    )
    assert (
        within_positions({"model": "gpt2", "ctx": "5000"}, notes)["ctx"] == "5000"
        and "index error" in notes[1]
    )
    assert (
        within_positions({"model": "tinyllama"}, notes) == {"model": "tinyllama"}
        and len(notes) == 2
    )


def test_figures_of_a_message_are_read() -> None:
    message = read_message(MESSAGE)
    assert message.tried == round(1.95 * GIB)
    assert message.free == round(615.06 * MIB)
    assert message.other_processes == round(1.5 * GIB)
    assert message.outside_pytorch == round(21.5 * GIB) - round(17.81 * GIB) - round(3.2 * GIB)
    old = read_message(OLD_MESSAGE)
    assert (old.capacity, old.allocated, old.unallocated) == (
        round(15.78 * GIB),
        13 * GIB,
        GIB // 2,
    )
    assert old.missing == 2 * GIB - round(1.2 * GIB) - GIB // 2


def test_oom_tells_fragmentation_from_need_and_from_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def explained(text: str) -> str:
        file = tmp_path / "message.txt"
        file.write_text(text)
        return output_of(capsys, "oom", str(file))

    assert "expandable_segments:True" in explained(MESSAGE)
    assert "too little" in explained(OLD_MESSAGE)
    others = (
        MESSAGE.replace("3.20 GiB is reserved", "0.20 GiB is reserved")
        .replace("process has 21.50 GiB", "process has 18.50 GiB")
        .replace("has 1.50 GiB", "has 4.50 GiB")
    )
    assert "another process" in explained(others)


def test_oom_names_the_tensor_of_that_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "message.txt"
    file.write_text(
        "CUDA out of memory. Tried to allocate 1000.00 MiB. GPU 0 has a total capacity of 15.00 GiB"
        " of which 15.06 MiB is free."
    )
    text = output_of(
        capsys, "oom", str(file), "--model", "tinyllama", "--qlora", "--bs", "4", "--ctx", "2048"
    )
    assert "log_softmax" in text and "--loss chunked" in text


def test_a_change_is_enough_where_the_whole_step_then_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "message.txt"
    file.write_text(
        "CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total capacity of 15.00 GiB"
        " of which 15.06 MiB is free."
    )
    text = output_of(capsys, "oom", str(file), "--model", "llama-2-7b", "--full", "--ctx", "1024")
    assert (
        "of 15.0 GiB that PyTorch can have" in text
        and "(not enough alone)" in text
        and "(enough)" not in text
    )


def test_other_text_is_no_message() -> None:
    with pytest.raises(InputError, match="no CUDA out-of-memory message"):
        read_message("Segmentation fault")


def test_compare_sides_agree_and_sum(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "bars.svg"
    flags = ("--model", model, "--lora", "--ctx", "64", "--precision", "bf16")
    document = json.loads(output_of(capsys, "compare", *flags, "--json", "--picture", str(picture)))
    assert document["names"] == ["analytic", "traced"]
    for side in document["names"]:
        assert sum(row[side] for row in document["by_role"].values()) == document["peak"][side]
        assert sum(row[side] for row in document["by_module"].values()) == document["peak"][side]
    assert document["peak"]["traced"] == pytest.approx(document["peak"]["analytic"], rel=0.02)
    assert picture.read_text().startswith("<svg")
    assert "UNEXPLAINED" in output_of(capsys, "compare", *flags)


def test_compare_takes_a_snapshot_as_the_measured_side(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(tmp_path / "step.pickle")
    flags = ("--model", model, "--ctx", "64")
    output_of(capsys, "trace", *flags, "--snapshot", snapshot)
    document = json.loads(
        output_of(capsys, "compare", "analytic", "traced", snapshot, *flags, "--json")
    )
    assert document["peak"]["measured"] == document["peak"]["traced"]


def test_one_side_cannot_be_compared(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["traced", "--model", model], [model, "traced"]):
        assert main(["compare", *line]) == 2
        assert "'traced' cannot be compared; name two or three" in capsys.readouterr().err


def test_a_model_alone_is_compared_as_with_its_flag(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--ctx", "64", "--json")
    assert output_of(capsys, "compare", model, *flags) == output_of(
        capsys, "compare", "--model", model, *flags
    )


def test_module_groups_drop_wrappers_and_numbers() -> None:
    assert (
        module_group("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default")
        == "layers.*.self_attn.q_proj"
    )
    assert module_group("model.layers.11.mlp.act_fn") == "layers.*.mlp"
    assert module_group("") == "(root)"


def test_what_only_one_side_knows_is_a_difference_not_a_gap() -> None:
    one, other = (timeline_of(trace_config(FAMILIES["llama"], sequence_length=s)) for s in (16, 32))
    result = compare({"a": one, "b": other})
    assert [sum(column) for column in zip(*result.by_module.values(), strict=True)] == list(
        result.totals
    )


@pytest.mark.parametrize(
    ("command", "ended"), [(["calibration", "show"], True), (["--model", "gpt2"], False)]
)
def test_long_commands_end_in_order(command: list[str], ended: bool, tmp_path: Path) -> None:
    """What they loaded is ended before the process: triton's bindings print a page about every
    object left over. A short command has nothing to end, and does not take the time."""
    code = (
        f"import atexit, sys; sys.argv[1:] = {command!r}; atexit.register(print, 'ended in order');"
        " from napkinmath.cli.main import entry; entry()"
    )
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout and done.stdout.rstrip().endswith("ended in order") == ended
