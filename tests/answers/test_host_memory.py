"""Host memory of a machine: torch's pinned blocks, and public threads about machines that ran out."""

from __future__ import annotations

import pytest
from napkinmath.answers.figures import Verdict
from napkinmath.answers.pinned import pinned_rounding
from napkinmath.base.units import GIB, pinned_block
from napkinmath.estimate import estimate


def test_pinned_blocks_are_powers_of_two() -> None:
    sizes = [0, 1, 4096, 4097, 8695185408]
    # the last is of pytorch/pytorch#95823: 16,406 - 12 MiB of shared memory for 8.1 GiB
    assert [pinned_block(n) for n in sizes] == [0, 1, 4096, 8192, 16 * GIB]


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_deepspeed_pins_whole_partitions(kind: str) -> None:
    """Llama 2 7B over 8 ranks, by hand: a rank's part is 0.842e9 parameters. Stage 2 pins 3.37 GB of
    masters, as much of gradients and 1.68 GB of the 16-bit copy; stage 3 1.68 GB of gradients in 16
    bits and 3.37 of a sub-group's in fp32."""
    e = estimate(
        "llama-2-7b", gpus=8, gpu="a100-80", data_parallel=kind, offload="optimizer", ctx=64
    )
    own = e.num_parameters / 8
    wide, half = 4 * GIB - 4 * own, 2 * GIB - 2 * own
    expected = 2 * wide + half if kind == "zero2" else wide + half
    assert pinned_rounding(e) == pytest.approx(expected, rel=0.01)
    assert e.host_memory.training == 8 * (e.host_bytes + pinned_rounding(e))


def test_fsdp2_pins_each_shard_and_states_are_not_pinned() -> None:
    e = estimate(
        "llama-2-7b",
        gpus=8,
        gpu="a100-80",
        data_parallel="fsdp2",
        offload="optimizer,parameters",
        ctx=64,
    )
    gate, embedding = 4096 * 11008 * 4 // 8, 32000 * 4096 * 4 // 8
    expected = 32 * 3 * (pinned_block(gate) - gate) + 2 * (pinned_block(embedding) - embedding)
    assert pinned_rounding(e) == expected


@pytest.mark.parametrize(("stack", "read"), [("megatron", False), ("hf", True)])
def test_a_rank_of_megatron_makes_its_part_on_the_device(stack: str, read: bool) -> None:
    e = estimate("llama-2-7b", gpus=8, gpu="a100-80", tp=2, stack=stack, ctx=64)
    assert (e.host_memory.loading > 0) is read


@pytest.mark.parametrize(
    ("model", "given"),
    [
        # OpenRLHF/OpenRLHF#171: PPO, a GPU for each model, killed at 445 of 468.75 GiB
        ("baichuan-13b", {"gpu": "a100-80", "zero": "2", "host_ram": "468.75GiB"}),
        # OpenRLHF/OpenRLHF#332: 1,600 GB a node, killed in the first update
        ("llama-2-70b", {"gpus": 16, "nodes": 2, "zero": "3", "host_ram": "1600GB"}),
    ],
)
def test_threads_about_host_memory(model: str, given: dict[str, object]) -> None:
    options: dict[str, object] = {
        "gpu": "a100-80",
        "workload": "ppo",
        "rollout": "none",
        "rollout_trainer": "openrlhf",
        "offload": "optimizer",
        "reduce_dtype": "fp32",
        "bs": 1,
        "ctx": 2048,
        "checkpointing": "full",
    }
    e = estimate(model, **{**options, **given})
    assert e.verdict is Verdict.DOES_NOT_FIT
    assert e.priced_verdict is Verdict.FITS  # the GPUs are large enough
