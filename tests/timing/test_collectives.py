"""Collectives: against published nccl-tests runs, and what must hold of any model of them."""

from __future__ import annotations

import statistics

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB, MIB
from napkinmath.catalog.gpus import find_hardware, load_gpus
from napkinmath.config.cluster import Cluster, NetworkLink
from napkinmath.timing.collectives import (
    KINDS,
    algorithms,
    bus_factor,
    collective_s,
    fabric,
)

# Microseconds of messages of 4 KiB, 2 MiB, 32 MiB and 512 MiB on 2 and 8 GPUs of a node, NCCL 2.26
# to 2.29: tables of nccl-tests that ai-dynamo/aiconfigurator carries (systems/data/*/comm/nccl),
# medians where a size was run more than once.
SIZES = (4 << 10, 2 * MIB, 32 * MIB, 512 * MIB)
MEASURED = (
    ("A100-SXM4-80GB", "all-reduce", 2, (10, 48, 224, 2781)),
    ("A100-SXM4-80GB", "all-reduce", 8, (21, 54, 367, 4226)),
    ("A100-SXM4-80GB", "all-gather", 2, (9, 38, 154, 1790)),
    ("A100-SXM4-80GB", "all-gather", 8, (15, 33, 218, 2288)),
    ("A100-SXM4-80GB", "reduce-scatter", 2, (9, 35, 135, 1612)),
    ("A100-SXM4-80GB", "reduce-scatter", 8, (15, 34, 210, 2207)),
    ("A100-SXM4-80GB", "all-to-all", 2, (11, 29, 136, 1635)),
    ("A100-SXM4-80GB", "all-to-all", 8, (16, 39, 191, 2314)),
    ("H100-SXM5-80GB", "all-reduce", 2, (6, 28, 144, 1686)),
    ("H100-SXM5-80GB", "all-reduce", 8, (16, 38, 200, 2111)),
    ("H100-SXM5-80GB", "all-gather", 2, (5, 17, 93, 1039)),
    ("H100-SXM5-80GB", "all-gather", 8, (11, 22, 125, 1402)),
    ("H100-SXM5-80GB", "reduce-scatter", 2, (5, 15, 96, 1078)),
    ("H100-SXM5-80GB", "reduce-scatter", 8, (11, 18, 111, 1399)),
    ("H100-SXM5-80GB", "all-to-all", 2, (7, 16, 81, 959)),
    ("H100-SXM5-80GB", "all-to-all", 8, (8, 19, 125, 1490)),
    ("H200-SXM5-141GB", "all-reduce", 2, (7, 27, 136, 1682)),
    ("H200-SXM5-141GB", "all-reduce", 8, (17, 39, 197, 2043)),
    ("H200-SXM5-141GB", "all-gather", 2, (5, 16, 90, 1044)),
    ("H200-SXM5-141GB", "all-gather", 8, (11, 23, 121, 1391)),
    ("H200-SXM5-141GB", "reduce-scatter", 2, (5, 15, 92, 1093)),
    ("H200-SXM5-141GB", "reduce-scatter", 8, (11, 21, 109, 1394)),
    ("H200-SXM5-141GB", "all-to-all", 2, (7, 15, 81, 898)),
    ("H200-SXM5-141GB", "all-to-all", 8, (11, 18, 122, 1463)),
    ("B200-SXM-180GB", "all-reduce", 2, (10, 19, 83, 1005)),
    ("B200-SXM-180GB", "all-reduce", 8, (26, 32, 168, 1335)),
    ("B200-SXM-180GB", "all-gather", 2, (9, 16, 54, 612)),
    ("B200-SXM-180GB", "all-gather", 8, (19, 24, 114, 761)),
    ("B200-SXM-180GB", "reduce-scatter", 2, (9, 15, 55, 651)),
    ("B200-SXM-180GB", "reduce-scatter", 8, (16, 21, 107, 766)),
    ("B200-SXM-180GB", "all-to-all", 2, (9, 19, 64, 810)),
    ("B200-SXM-180GB", "all-to-all", 8, (13, 22, 89, 834)),
    ("RTX PRO 6000 Blackwell Server", "all-reduce", 2, (7, 72, 931, 13901)),
    ("RTX PRO 6000 Blackwell Server", "all-reduce", 8, (26, 221, 2494, 38073)),
    ("RTX PRO 6000 Blackwell Server", "all-gather", 2, (6, 47, 540, 8306)),
    ("RTX PRO 6000 Blackwell Server", "all-gather", 8, (16, 117, 1300, 20405)),
    ("RTX PRO 6000 Blackwell Server", "reduce-scatter", 2, (6, 49, 574, 7971)),
    ("RTX PRO 6000 Blackwell Server", "reduce-scatter", 8, (16, 119, 1282, 19947)),
    ("RTX PRO 6000 Blackwell Server", "all-to-all", 2, (7, 50, 642, 10448)),
    ("RTX PRO 6000 Blackwell Server", "all-to-all", 8, (17, 139, 1818, 25503)),
)
# Middle sizes fall between NCCL's protocols, whose switches no table shows; large ones are what a
# training step sends.
MEDIAN_LARGE, WORST_LARGE, MEDIAN_ALL = 0.08, 0.45, 0.15


def node(gpu: str, gpus: int = 8, nodes: int = 1, network: NetworkLink | None = None) -> Cluster:
    return Cluster(
        hardware=find_hardware(gpu), gpus_per_node=gpus, num_nodes=nodes, network=network
    )


def errors(sizes: tuple[int, ...]) -> list[float]:
    return [
        collective_s(kind, size, fabric(node(gpu), ranks)) / (measured * 1e-6) - 1
        for gpu, kind, ranks, row in MEASURED
        for size, measured in zip(SIZES, row, strict=True)
        if size in sizes
    ]


def test_large_messages_take_what_was_measured() -> None:
    found = errors(SIZES[-1:])
    assert statistics.median(abs(e) for e in found) < MEDIAN_LARGE
    assert max(abs(e) for e in found) < WORST_LARGE
    assert abs(statistics.median(found)) < 0.05


def test_all_sizes_take_roughly_what_was_measured() -> None:
    assert statistics.median(abs(e) for e in errors(SIZES)) < MEDIAN_ALL


@pytest.mark.parametrize(
    ("gpu", "ranks", "gb_per_s"),
    # Bus bandwidth of all-reduce at 8 GiB with sums in the switch: stas00/ml-engineering
    # network/README.md.
    [
        ("H200", 4, 363.3),
        ("H200", 5, 414.2),
        ("H200", 6, 435.6),
        ("H200", 8, 473.1),
        ("B200", 4, 673.2),
        ("B200", 6, 778.2),
        ("B200", 8, 838.0),
        ("MI300X", 2, 47.7),
        ("MI300X", 8, 312.9),
    ],
)
def test_bus_bandwidth_of_large_all_reduces(gpu: str, ranks: int, gb_per_s: float) -> None:
    size = 8 * GIB
    found = (
        size
        / collective_s("all-reduce", size, fabric(node(gpu), ranks))
        * bus_factor("all-reduce", ranks)
        / 1e9
    )
    assert found == pytest.approx(gb_per_s, rel=0.15)


def test_the_switch_sums_from_the_group_size_on_at_which_it_does() -> None:
    assert "nvls" not in algorithms("all-reduce", GIB, fabric(node("H200"), 4))
    assert "nvls" in algorithms("all-reduce", GIB, fabric(node("H200"), 5))
    assert "nvls" not in algorithms("all-gather", GIB, fabric(node("H200"), 8))


@given(
    st.sampled_from(KINDS),
    st.integers(1, 1 << 32),
    st.integers(2, 64),
    st.sampled_from(["A100", "H100", "RTX 3090", "MI300X", "V100-SXM2-32GB"]),
)
def test_more_bytes_never_take_less_time(kind: str, size: int, ranks: int, gpu: str) -> None:
    group = fabric(node(gpu, nodes=8), ranks)
    assert (
        0
        < collective_s(kind, size, group)
        <= collective_s(kind, 2 * size, group)
        <= 2 * collective_s(kind, size, group)
    )


@given(st.integers(1, 1 << 30), st.sampled_from([2, 4, 8, 16, 64]))
def test_an_all_reduce_is_a_reduce_scatter_and_a_gather(size: int, ranks: int) -> None:
    group = fabric(node("A100", nodes=8), ranks)
    ring = algorithms("all-reduce", size, group)["ring"]
    parts = collective_s("reduce-scatter", size, group) + collective_s("all-gather", size, group)
    assert ring <= parts * 1.01


def test_arrays_give_what_numbers_give() -> None:
    group = fabric(node("H100", nodes=2), 16)
    sizes = numpy.array([1 << 10, 1 << 20, 1 << 30])
    for kind in KINDS:
        assert collective_s(kind, sizes, group) == pytest.approx(
            [collective_s(kind, int(s), group) for s in sizes]
        )


def test_groups_of_a_stride_share_the_adapters_of_their_nodes() -> None:
    """Eight groups, each with one rank a node, have an eighth of the adapters each; one group with
    all ranks has them all."""
    cluster = node("H100", nodes=4)
    whole, strided = fabric(cluster, 32), fabric(cluster, 4, stride=8)
    assert (strided.nodes, whole.nodes) == (4, 4)
    assert strided.network_bytes_per_s == pytest.approx(whole.network_bytes_per_s / 8)
    assert fabric(cluster, 8).nodes == 1
    assert fabric(cluster, 4, stride=2).nodes == 1


def test_slow_ways_are_slower() -> None:
    size = 256 * MIB
    ways = [
        node("H100"),
        node("A100"),
        node("RTX PRO 6000 Blackwell"),
        node("RTX 4090"),
        node("RTX 3090", gpus=2),
    ]
    times = [collective_s("all-gather", size, fabric(cluster, 2)) for cluster in ways]
    assert times == sorted(times)
    networks = [
        NetworkLink(kind=kind, gbit_per_s_per_gpu=rate)
        for kind, rate in (("ib-ndr", 400), ("ib-hdr", 200), ("roce", 100), ("ethernet", 1.25))
    ]
    times = [
        collective_s("all-gather", size, fabric(node("A100", nodes=2, network=network), 16))
        for network in networks
    ]
    assert times == sorted(times)


def test_one_rank_alone_takes_no_time() -> None:
    assert collective_s("all-reduce", GIB, fabric(node("H100"), 1)) == 0


@pytest.mark.parametrize("gpu", [gpu.name for gpu in load_gpus()])
def test_ranks_that_are_alone_in_their_nodes_talk_over_the_network(gpu: str) -> None:
    cluster = Cluster(hardware=find_hardware(gpu), num_nodes=4, gpus_per_node=8)
    for kind in KINDS:
        seconds = collective_s(kind, GIB, fabric(cluster, 4, 8))
        assert 0 < seconds < 60, (kind, seconds)


def test_wrong_groups_and_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="does not fit 8 GPUs"):
        fabric(node("H100"), 16)
    with pytest.raises(InputError, match="unknown"):
        collective_s("gossip", 1, fabric(node("H100"), 2))


def test_switches_between_machines_join_their_gpus() -> None:
    """GB200 NVL72: 18 machines of four GPUs in one NVLink domain; the 19th is across the network."""
    racks = Cluster(hardware=find_hardware("GB200"), num_nodes=36, gpus_per_node=4)
    assert fabric(racks, 16).nodes == 1 and fabric(racks, 72).nodes == 1
    assert fabric(racks, 144).nodes == 2 and fabric(racks, 2, stride=72).nodes == 2


def test_gradients_quantized_by_zero_travel_between_nodes_once_a_node() -> None:
    """ZeRO++ sums int4 within a node before they leave it: over a thin network about an eighth of
    what a flat all-to-all of eight GPUs a node sends, and a quarter of a reduce-scatter's."""

    def seconds(kind: str, nbytes: int, nodes: int) -> float:
        cluster = Cluster(
            hardware=find_hardware("A100-SXM4-80GB"),
            gpus_per_node=8,
            num_nodes=nodes,
            network=NetworkLink(kind="ethernet", gbit_per_s_per_gpu=12.5),
        )
        return collective_s(kind, nbytes, fabric(cluster, 8 * nodes))

    quantized, whole = 256 * MIB, 1024 * MIB
    staged = seconds("staged all-to-all", quantized, 4)
    assert seconds("all-to-all", quantized, 4) > 6 * staged
    assert seconds("reduce-scatter", whole, 4) > 3 * staged
    assert seconds("staged all-to-all", quantized, 1) == seconds("all-to-all", quantized, 1)
