"""The machine around the GPUs: what its memory, cores and disks take of a step."""

from __future__ import annotations

import pytest
from napkinmath import Estimate
from napkinmath.answers.speed_range import tokens_range
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_gpu
from napkinmath.config.hardware import Host
from napkinmath.inputs.jobs import priced
from napkinmath.timing.host import disk_s, host_pass_s

SERVER = Host(cores=64, memory_bytes_per_s=400e9)
SMALL = {"model": "tinyllama", "bs": 1, "ctx": 512, "full": True, "checkpointing": "full"}


def of(**options: object) -> Estimate:
    return priced({**SMALL, **options}, [])[0]


def seconds(**options: object) -> float:
    time = of(**options).time
    assert time is not None
    return time.seconds


def test_ranks_share_the_memory_of_their_machine() -> None:
    alone = host_pass_s(1e9, False, 1, SERVER)
    assert host_pass_s(1e9, False, 8, SERVER) == pytest.approx(8 * alone)
    assert host_pass_s(2e9, False, 8, SERVER) == pytest.approx(16 * alone)


def test_one_core_a_rank_is_slower_until_the_memory_is_full() -> None:
    assert host_pass_s(1e9, True, 1, SERVER) > host_pass_s(1e9, False, 1, SERVER)
    assert host_pass_s(1e9, True, 64, SERVER) == host_pass_s(1e9, False, 64, SERVER)


def test_disks_are_shared_too() -> None:
    assert disk_s(6e9, 0, 1, SERVER) == pytest.approx(1.0)
    assert disk_s(6e9, 3e9, 4, SERVER) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("engine", "offload"),
    [
        ({"gpu": "a100"}, "optimizer"),
        ({"gpus": "8xa100", "data_parallel": "zero1"}, "optimizer"),
        ({"gpus": "8xa100", "data_parallel": "zero2"}, "optimizer"),
        ({"gpus": "8xa100", "data_parallel": "zero3"}, "optimizer"),
        ({"gpus": "8xa100", "data_parallel": "zero3"}, "optimizer,parameters"),
        ({"gpus": "8xa100", "data_parallel": "fsdp2"}, "optimizer,parameters"),
        ({"gpus": "8xa100", "data_parallel": "fsdp1"}, "optimizer,parameters"),
    ],
    ids=str,
)
def test_offloading_is_never_free(engine: dict[str, object], offload: str) -> None:
    plain, away = seconds(**engine), of(**engine, offload=offload)
    assert away.time is not None and away.time.seconds > 1.5 * plain
    assert away.time.share("host memory") > 0.3
    slower = seconds(**engine, offload=offload, host="memory=40GB/s,cores=4")
    assert slower > 1.5 * away.time.seconds
    span = tokens_range(away)
    assert span is not None and span.high / span.low > 1.5  # no machine was named


def test_disks_take_longer_than_memory() -> None:
    engine = {"gpus": "8xa100", "data_parallel": "zero3", "offload": "optimizer,parameters"}
    memory = seconds(**engine)
    states = seconds(**engine, nvme="optimizer")
    everything = seconds(**engine, nvme="optimizer,parameters")
    assert memory < states < everything
    assert seconds(**engine, nvme="optimizer,parameters", host="disk=50GB/s") < everything / 4


def test_the_update_reads_and_writes_what_its_source_says() -> None:
    """DeepSpeed's: 28 bytes in Adam's pass, 8 to scale gradients, 6 to cast parameters."""
    e = of(gpus="8xa100", data_parallel="zero3", offload="optimizer")
    assert e.time is not None
    found = e.time.share("host memory") * e.time.seconds
    wanted = e.num_parameters * 42 / (0.25 * 410e9)
    assert found == pytest.approx(wanted, rel=0.06)  # the slowest of eight ranks sets the pace


def test_torchtune_with_everything_on_the_host_is_near_its_readme() -> None:
    """70B in full on eight A100: 1,568 tokens a second (torchtune README.md, September 2024)."""
    (e,) = priced(
        {
            "model": "llama-3.1-70b",
            "full": True,
            "precision": "bf16",
            "gpus": "8xa100-80",
            "data_parallel": "fsdp2",
            "offload": "optimizer,parameters",
            "stack": "torchtune",
            "optimizer": "adamw-fused",
            "bs": 2,
            "ctx": 2048,
            "checkpointing": "full",
            "compile": True,
        },
        [],
    )
    assert e.time is not None
    assert 8 * e.time.tokens_per_s == pytest.approx(1568, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "memory", "memory=x", "memory=nan", "cores=1.5", "ram=3", "disk=0"]
)
def test_a_host_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"--host|a host"):
        of(gpu="a100", offload="optimizer", host=text)


def test_a_graces_memory_is_shared_by_its_own_gpus_alone() -> None:
    """Four GH200 have four processors: they updated as if all sat beside one of x86."""
    alone, beside = (find_gpu(name).host for name in ("gh200", "gb200"))
    assert host_pass_s(1e9, False, 4, alone) == host_pass_s(1e9, False, 1, alone)
    assert host_pass_s(1e9, False, 4, beside) == host_pass_s(1e9, False, 2, beside)
    assert host_pass_s(1e9, False, 4, alone) < host_pass_s(1e9, False, 4, find_gpu("h100").host) / 4
