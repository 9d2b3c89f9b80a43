"""`estimate plan --gpus N`: the fastest of all that fit, each row the same estimate again by its
own flags, and what it refuses."""

from __future__ import annotations

import json
import shlex

import pytest
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.cli.main import main
from napkinmath.config.cluster import Cluster
from napkinmath.estimate import Verdict, estimate
from napkinmath.inputs.options import train_config
from napkinmath.models.read import read_model
from napkinmath.planning.meshes import meshes
from napkinmath.planning.plan_cluster import plan_cluster
from napkinmath.planning.space import EXPERTS_PACKED, concerns
from napkinmath.timing.efficiency import default_efficiency

GIVEN = [
    "--model",
    "llama-3.2-1b",
    "--gpus",
    "4xH100",
    "--ctx",
    "1k",
    "--method",
    "full",
    "--checkpointing",
    "none",
    "--bs",
    "1,2",
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.slow
def test_a_row_estimates_the_same_by_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", *GIVEN, "--json", "--top", "6")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 6
    for row in rows:
        options = {
            k: v
            for k, v in row["options"].items()
            if k not in ("gpus", "data_parallel", "pp_schedule", "tp", "pp", "cp", "ep")
        }
        flags = [
            word
            for key, value in options.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        code, out, _ = run(
            capsys, "--model", "llama-3.2-1b", *row["mesh"].split(), *flags, "--json"
        )
        again = json.loads(out)
        assert code == 0
        assert again["memory"]["device"]["value"] == row["device_bytes"]
        assert again["time"]["all_gpus"]["tokens_per_s"] == pytest.approx(
            row["tokens_per_s"], rel=1e-9
        )


@pytest.mark.slow
def test_the_first_row_is_the_fastest_of_all() -> None:
    spec, hardware = (
        read_model("llama-3.2-1b"),
        find_hardware("H100").replace(memory_bytes=24 << 30),
    )
    machines, speed = Cluster(hardware=hardware, gpus_per_node=4), default_efficiency(hardware.gpu)
    given: dict[str, list[object]] = {
        "ctx": ["1024"],
        "method": ["full"],
        "checkpointing": ["none", "full"],
        "bs": ["1", "2"],
    }
    found = plan_cluster(spec, machines, given, speed, top=3)
    every: list[float] = []
    for kind in ("ddp", "zero1", "zero3", "fsdp2"):
        for checkpointing in given["checkpointing"]:
            for bs in given["bs"]:
                options = {
                    "ctx": "1024",
                    "method": "full",
                    "checkpointing": checkpointing,
                    "bs": bs,
                    "data_parallel": kind,
                    "gpus": "4",
                }
                for mesh in meshes(spec, machines, train_config(options)):
                    try:
                        e = estimate(spec, mesh, hardware=machines)
                    except InputError:
                        continue
                    if e.verdict is Verdict.FITS and e.throughput is not None:
                        every.append(e.throughput.tokens_per_s)
    best = sorted(set(every), reverse=True)
    assert found[0].price.tokens_per_s == pytest.approx(best[0], rel=1e-9)


@pytest.mark.slow
def test_degrees_that_are_given_stay(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", *GIVEN, "--tp", "2", "--json")
    assert {
        word for row in json.loads(out) for word in (row["mesh"].partition("--tp ")[2][:1],)
    } == {"2"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tp", "3"], "3"),
        (["--data-parallel", "foo"], "foo"),
        (["--method", "potato"], "potato"),
        (["--bs", "0"], "0"),
        (["--goal", "context"], "context"),
        (["--pp", "100"], "100"),
        (["--cp", "3"], "3"),
    ],
)
def test_what_cannot_be_is_one_line(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "plan", "--model", "llama-3.2-1b", "--gpus", "8xH100", *more)
    assert code == 2 and err.count("\n") == 1 and said in err


@pytest.mark.slow
def test_nothing_that_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "plan",
        "--model",
        "llama-3.1-405b",
        "--gpus",
        "2xT4",
        "--method",
        "full",
        "--bs",
        "1",
        "--ctx",
        "1k",
    )
    assert code == 1 and "nothing fits" in out


@pytest.mark.slow
def test_host_memory_is_searched_before_nothing_is_said_to_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `estimate` says fits with offloading, the plan finds; and its own command fits."""
    argv = [
        "--model",
        "qwen3-0.6b",
        "--gpus",
        "2xT4",
        "--vram",
        "2GiB",
        "--ctx",
        "512",
        "--precision",
        "fp32",
    ]
    code, out, _ = run(capsys, "plan", *argv, "--method", "full", "--top", "1", "--json")
    (best,) = json.loads(out)
    assert code == 0 and "offload" in best["options"]
    flags = [
        word
        for key, value in best["options"].items()
        for word in (f"--{key.replace('_', '-')}", str(value))
        if key not in ("gpus", "ctx", "precision", "tp", "pp", "cp", "data_parallel")
    ]
    mesh = best["mesh"].replace("--gpus 2xT4", "").split()
    assert run(capsys, *argv, *flags, *mesh)[0] == 0


@pytest.mark.slow
def test_a_global_batch_is_divided_mesh_by_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """64 GPUs and 16 sequences: no mesh of 64 data-parallel ranks, many of fewer."""
    argv = [
        "plan",
        "--model",
        "llama-3.2-1b",
        "--gpus",
        "64xH100",
        "--global-batch",
        "16",
        "--method",
        "full",
        "--bs",
        "1",
    ]
    code, out, _ = run(capsys, *argv, "--ctx", "512", "--top", "2", "--json")
    rows = json.loads(out)
    assert code == 0 and rows
    assert all(row["options"]["global_batch"] == 16 for row in rows)
    code, _, err = run(capsys, *argv, "--grad-accum", "2")
    assert code == 2 and "twice" in err


@pytest.mark.slow
def test_experts_are_packed_where_a_model_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Unpacked they stay in 16 bits or more: QLoRA of Mixtral 8x7B fits two GPUs of 24 GB packed."""
    given = ["--gpus", "2xrtx3090", "--qlora", "--checkpointing", "full", "--bs", "1", "--ep", "2"]
    code, out, _ = run(capsys, "plan", "--model", "mixtral-8x7b", *given, "--json", "--top", "2")
    rows = json.loads(out)
    assert code == 0 and rows and all(row["options"]["quantize_experts"] is True for row in rows)
    dense = concerns(read_model("llama-7b"), EXPERTS_PACKED[0])
    assert not dense and concerns(read_model("mixtral-8x7b"), EXPERTS_PACKED[0])


@pytest.mark.slow
def test_every_row_is_the_command_that_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of one sequence hold shards of packed weights too: their strategy is in the row. No
    row has packed weights over tensor ranks, unless asked for."""
    argv = ["--model", "llama-3.2-1b", "--gpus", "2xT4", "--qlora", "--ctx", "2048", "--bs", "1"]
    code, out, err = run(capsys, "plan", *argv, "--json")
    rows = json.loads(out)
    assert code == 0 and any("--cp 2" in row["mesh"] for row in rows)
    assert not any("--tp" in row["mesh"] for row in rows) and "over tensor ranks" in err
    for row in rows:
        words = ["--qlora", *shlex.split(row["mesh"])]
        for name in row["options"].keys() - {"method", "gpus", "data_parallel"}:
            words += [f"--{name}", row["options"][name]]
        assert main(["--model", "llama-3.2-1b", "--json", *words]) == 0
        device = json.loads(capsys.readouterr().out)["memory"]["device"]["value"]
        assert device == pytest.approx(row["device_bytes"], rel=1e-6), row["mesh"]
    code, out, _ = run(capsys, "plan", *argv, "--tp", "2", "--json")
    assert code == 0 and all("--tp 2" in row["mesh"] for row in json.loads(out))


@pytest.mark.slow
def test_gpus_that_do_not_compute_in_bf16_are_given_fp16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on one GPU: two T4 were said to be slower than one."""
    argv = ["plan", "--model", "llama-3.2-1b", "--ctx", "2048", "--bs", "1", "--json", "--top", "2"]
    (first, *_) = json.loads(run(capsys, *argv, "--gpus", "2xT4")[1])
    assert first["options"]["precision"] == "fp16-autocast"
    alone = json.loads(run(capsys, *argv, "--gpu", "t4")[1])["best"][0]
    assert first["tokens_per_s"] > alone["tokens_per_s"]
    (given, *_) = json.loads(run(capsys, *argv, "--gpus", "2xT4", "--precision", "fp32")[1])
    assert given["options"]["precision"] == "fp32"
