"""What NCCL's communicators hold, against its arithmetic and what users measured."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.base.units import MIB
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.cluster import Cluster
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.ir.stack import EngineCode
from napkinmath.timing.communicators import communicator_bytes

# All connections of an all-to-all are counted; what else its first call loads is not.
ALL_TO_ALL = 0.2
ZERO: dict[str, Any] = {"data_parallel": DataParallel.ZERO1}


def held_mib(
    gpu: str, nodes: int = 1, per_node: int = 8, nccl: tuple[int, int] = (2, 27), **mesh: Any
) -> float:
    cluster = Cluster(hardware=find_hardware(gpu), num_nodes=nodes, gpus_per_node=per_node)
    stack = STACKS["hf"].replace(engine=EngineCode(nccl=nccl))
    return communicator_bytes(cluster, ParallelConfig(**mesh), stack) / MIB


@pytest.mark.parametrize(
    ("gpu", "channels"), [("V100", 12), ("H800", 16), ("A100", 24), ("H100", 24), ("B200", 32)]
)
def test_a_ring_holds_twelve_mib_a_channel(gpu: str, channels: int) -> None:
    """Channels as NCCL logs them (nccl issue 892: 16 on H800)."""
    split: dict[str, Any] = {"sequence_parallel": True}  # gathers and scatters, which are rings
    two, eight = (held_mib(gpu, tensor_parallel_size=n, per_node=n, **split) for n in (2, 8))
    assert two == eight == 54 + 12 * channels


@pytest.mark.parametrize(
    ("nccl", "block"), [((2, 16), 0), ((2, 19), 6), ((2, 20), 6), ((2, 21), 3), ((2, 27), 1)]
)
def test_sums_through_the_switch_hold_two_blocks_a_gpu_and_channel(
    nccl: tuple[int, int], block: int
) -> None:
    """NCCL transport/nvls.cc: 16 channels; A100 has no such sums, and two GPUs use none."""
    for ranks in (4, 8):
        mesh: dict[str, Any] = {"tensor_parallel_size": ranks, "nccl": nccl, "per_node": 8}
        assert held_mib("H100", **mesh) - held_mib("A100", **mesh) == 2 * 16 * ranks * block
    assert held_mib("H100", tensor_parallel_size=2) == held_mib("A100", tensor_parallel_size=2)


def test_some_ranks_of_four_a100() -> None:
    """NVIDIA/nccl issue 964: 544 MiB of two, 688 of three and four, with NCCL before 2.22, of which
    256 are the buffer of sends (32 channels of 16 slots of 512 KiB)."""
    kernels = held_mib("RTX 3090", tensor_parallel_size=2, per_node=2)
    held = [held_mib("A100", tensor_parallel_size=n, per_node=4, nccl=(2, 18)) for n in (2, 3, 4)]
    assert [each - kernels for each in held] == [544, 688, 688]


def test_an_all_to_all_connects_every_pair() -> None:
    """NVIDIA/nccl issue 1685: 1.06 GB before, 4.34 after the first on 8 H100."""
    mesh: dict[str, Any] = {**ZERO, "data_parallel_size": 8}
    grown = held_mib("H100", **mesh, expert_parallel_size=8) - held_mib("H100", **mesh)
    assert grown * MIB == pytest.approx(3.28e9, rel=ALL_TO_ALL)
    gathered = held_mib("H100", **mesh, expert_parallel_size=8, expert_tokens_gathered=True)
    assert gathered - held_mib("H100", **mesh) == 24 * 12


def test_one_rank_has_none_and_cards_without_access_pass_through_the_host() -> None:
    assert held_mib("H100", per_node=1) == 0
    assert held_mib("RTX 4090", **ZERO, data_parallel_size=8) == 54
    assert held_mib("L40S", **ZERO, data_parallel_size=8) == 54 + 2 * 12


def test_every_axis_and_the_world_have_one() -> None:
    one = held_mib("A100", tensor_parallel_size=8)
    two = held_mib("A100", **ZERO, tensor_parallel_size=4, data_parallel_size=2)
    assert two - 54 == 3 * (one - 54)


def test_nodes_share_the_channels_of_their_adapters() -> None:
    """One GPU a node has two channels, four from Hopper on; a tree beside the ring."""
    mesh: dict[str, Any] = {**ZERO, "data_parallel_size": 2}
    assert held_mib("A100", nodes=2, per_node=1, **mesh) == 54 + 2 * (20 + 20)
    assert held_mib("H100", nodes=2, per_node=1, **mesh) == 54 + 4 * (20 + 20)


def test_losses_averaged_apart_have_a_communicator_of_their_own() -> None:
    """Megatron-Core before 0.8 averages losses over a second group of the same ranks."""
    cluster = Cluster(hardware=find_hardware("A100"), num_nodes=1, gpus_per_node=8)
    mesh = ParallelConfig(**ZERO, data_parallel_size=8)
    old = STACKS["megatron-2024"]
    one = old.replace(engine=old.engine.replace(averages_apart=False))
    grown = communicator_bytes(cluster, mesh, old) - communicator_bytes(cluster, mesh, one)
    assert grown == (688 * MIB)
