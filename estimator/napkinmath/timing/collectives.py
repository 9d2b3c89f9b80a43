"""Seconds of collectives on a cluster, as NCCL runs them: rings that pipeline, sums in the switch,
trees between nodes.

A ring of p steps cuts the message into chunks. With the best chunk it takes `(sqrt(wire) +
sqrt(hops))^2`, where `wire` is the message at the link's bandwidth and `hops` the sum of the steps'
latencies. The time of a small message is its hops, of a large one its bytes, and the rise between
them needs no further constant. Message sizes are those of nccl-tests: what a gather makes, what a
reduction reads, what one rank holds in an all-to-all. Sizes may be numbers or numpy arrays.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.catalog.links import (
    attained_on_gpu_link,
    attained_on_network,
    attained_on_pcie,
    default_network,
)
from napkinmath.config.cluster import Cluster, NetworkLink
from napkinmath.ir.costs import places_reached
from napkinmath.timing.efficiency import larger, smaller
from napkinmath.timing.mesh_groups import axis_strides

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from napkinmath.base.expr import Bindings
    from napkinmath.config.hardware import Gpu
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.costs import Collective

    Sizes: TypeAlias = Any  # an int, a float, or a numpy array of them
    Seconds: TypeAlias = Any

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send")
# Start of a collective's kernel, shares of the links (links.json), hops, and how much faster than its
# ring a GPU copies or sums a rank's own part, on the same few SMs: fitted together to the nccl-tests
# tables of ai-dynamo/aiconfigurator, 0.1 to 512 MB on 2, 4 and 8 of A100, H100, B200, GB200, GB300.
# benchmarks/accuracy/op_tables.py prints how far each GPU is off.
_START_S = 9e-6
_COPY_SPEED = {"all-gather": 2.8, "all-to-all": 1.6, "send": 1e9}
_SUM_SPEED = 3.7
_LEAST_COPY_BYTES_PER_S = (
    300e9  # where the ring is PCI Express, the copy within the GPU is still one of its memory
)
# Summing in the switch starts slower (NCCL src/graph/tuning.cc, hardware latency of NVLS) and
# pipelines with larger chunks.
_SHARP_START_S = 25e-6
_SHARP_CHUNK_S = 1.3e-6
# A tree's links carry what a ring's do, less a loss: NCCL src/graph/tuning.cc takes 0.92.
_TREE_SHARE = 0.92


class Fabric(Record):
    """What a group of ranks sees: bytes/s of its ring within a node, and of its share of the
    adapters between nodes; seconds of a hop."""

    ranks: int
    nodes: int
    bus_bytes_per_s: float
    hop_s: float
    network_bytes_per_s: float = 0.0
    network_hop_s: float = 0.0
    sharp_bytes_per_s: float = 0.0

    @property
    def slowest_bytes_per_s(self) -> float:
        """Of a ring through all ranks."""
        if self.nodes == 1:
            return self.bus_bytes_per_s
        return (
            self.network_bytes_per_s
            if self.ranks == self.nodes
            else min(self.bus_bytes_per_s, self.network_bytes_per_s)
        )


def fabric(cluster: Cluster, ranks: int, stride: int = 1) -> Fabric:
    """The fabric of a group of `ranks` ranks that lie `stride` apart; raises InputError where the
    cluster has fewer."""
    if ranks < 1 or stride < 1 or ranks * stride > cluster.num_gpus:
        raise InputError(
            f"a group of {ranks} ranks, {shown(stride)} apart, does not fit {cluster.num_gpus}"
            " GPUs; use fewer ranks"
        )
    per_node = max(1, min(ranks, cluster.linked_gpus // stride))
    nodes = -(-ranks // per_node)
    bus, hop, sharp = _within_node(cluster.hardware.gpu, per_node)
    if nodes == 1:
        return Fabric(ranks=ranks, nodes=1, bus_bytes_per_s=bus, hop_s=hop, sharp_bytes_per_s=sharp)
    link = network_of(cluster)
    attained = attained_on_network(link.kind)
    return Fabric(
        ranks=ranks,
        nodes=nodes,
        bus_bytes_per_s=bus,
        hop_s=hop,
        sharp_bytes_per_s=sharp,
        network_bytes_per_s=per_node * link.bytes_per_s * attained.share,
        network_hop_s=attained.hop_s,
    )


def network_of(cluster: Cluster) -> NetworkLink:
    """The link between a cluster's nodes: the one given, or what such nodes usually have."""
    return cluster.network or default_network(cluster.hardware.gpu)


def is_linked(cluster: Cluster, group: Fabric) -> bool:
    """Whether a group's ranks of one node talk over their GPUs' own links."""
    return has_links_for(cluster.hardware.gpu, -(-group.ranks // group.nodes))


def sources(cluster: Cluster, group: Fabric) -> tuple[str, ...]:
    """Where the shares and latencies of a group's links come from."""
    gpu = cluster.hardware.gpu
    within = (
        attained_on_gpu_link(gpu.gpu_link.kind, gpu.gpu_link.generation)
        if gpu.gpu_link is not None and is_linked(cluster, group)
        else attained_on_pcie(
            ranks=-(-group.ranks // group.nodes), through_host=not has_peer_access(gpu)
        )
    )
    between = attained_on_network(network_of(cluster).kind).sources if group.nodes > 1 else ()
    return tuple(dict.fromkeys((*within.sources, *between)))


def _within_node(gpu: Gpu, ranks: int) -> tuple[float, float, float]:
    """(bytes/s of a ring, seconds of a hop, bytes/s of sums in the switch) among some GPUs of a
    node."""
    link = gpu.gpu_link
    if link is not None and has_links_for(gpu, ranks):
        attained = attained_on_gpu_link(link.kind, link.generation)
        sharp = (
            attained.sharp_share * link.bytes_per_s
            if attained.sharp_from and ranks >= attained.sharp_from
            else 0.0
        )
        return attained.share * link.bytes_per_s * _links_used(gpu, ranks), attained.hop_s, sharp
    through_host = not has_peer_access(gpu)
    attained = attained_on_pcie(ranks=ranks, through_host=through_host)
    # A desktop processor has 16 lanes for graphics cards, which two cards share.
    lanes = (
        0.5
        if through_host and ranks == 2 and gpu.host_link.lanes == 16 and not gpu.host_link.own_lanes
        else 1.0
    )
    return attained.share * gpu.host_link.bytes_per_s * lanes, attained.hop_s, 0.0


def is_switched(gpu: Gpu) -> bool:
    """Whether all GPUs of a node reach each other at the full rate of their links (NVSwitch)."""
    return (
        "SXM" in gpu.name and gpu.compute_capability not in ("6.0", "7.0")
    ) or gpu.name.startswith(("GH", "GB2", "GB3", "H20-"))


def has_links_for(gpu: Gpu, ranks: int) -> bool:
    """Whether a group communicates over the GPUs' own links: bridges join pairs only, and GeForce
    cards seldom have one."""
    if gpu.gpu_link is None or gpu.name.startswith(("RTX 20", "RTX 30", "Titan")):
        return False
    return is_switched(gpu) or gpu.gpu_link.kind != "nvlink" or "SXM" in gpu.name or ranks == 2


def has_peer_access(gpu: Gpu) -> bool:
    """Whether GPUs read each other's memory over PCI Express; the driver denies it to GeForce
    cards."""
    return not gpu.name.startswith(
        ("RTX 20", "RTX 30", "RTX 40", "RTX 50", "Titan")
    ) or gpu.name.startswith(("RTX 4000", "RTX 5000"))


def _links_used(gpu: Gpu, ranks: int) -> float:
    """Share of a GPU's links that lead to members of the group."""
    alone = ranks == 1  # its messages leave the node, and these links do not slow them
    if alone or is_switched(gpu) or gpu.gpu_link is None:
        return 1.0
    if gpu.gpu_link.kind == "infinity-fabric":
        return min(1.0, (ranks - 1) / 7)
    if (
        "SXM" in gpu.name
    ):  # the hybrid cube mesh of eight: a pair shares two of six links, four use half
        return {2: 1 / 3, 3: 1 / 2, 4: 1 / 2}.get(ranks, 1.0)
    return 1.0


def collective_s(kind: str, nbytes: Sizes, group: Fabric) -> Seconds:
    """Seconds of one collective of `nbytes` by the fastest algorithm; InputError for a kind that
    does not exist."""
    return _fastest(algorithms(kind, nbytes, group))


def algorithms(kind: str, nbytes: Sizes, group: Fabric) -> dict[str, Seconds]:
    """Seconds by each algorithm that NCCL could choose."""
    if kind == "staged all-to-all":
        return {"staged": _staged_s(nbytes, group)}
    if kind not in KINDS:
        raise InputError(f"collective {shown(kind)} is unknown; use one of {', '.join(KINDS)}")
    if group.ranks == 1:
        return {"none": 0.0 * nbytes}
    if kind == "send":
        return {"direct": _pipelined(nbytes / _path(group), group.network_hop_s or group.hop_s)}
    if kind == "all-to-all":
        return {"direct": _all_to_all_s(nbytes, group)}
    found = {"ring": _ring_s(kind, nbytes, group)}
    if kind == "all-reduce":
        if group.nodes > 1:
            found["tree"] = _tree_s(nbytes, group)
        if group.sharp_bytes_per_s:
            found["nvls" if group.nodes == 1 else "nvls-tree"] = _sharp_s(nbytes, group)
    return found


def bus_factor(kind: str, ranks: int) -> float:
    """Bus bandwidth over message bytes per second, as nccl-tests define it."""
    if kind == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


class MeshNetwork:
    """What prices a step's collectives on a cluster: groups by axis of the mesh, tensor-parallel
    ranks innermost, pipeline stages outermost."""

    __slots__ = ("_cluster", "_fabrics", "_strides")

    def __init__(self, cluster: Cluster, parallel: ParallelConfig) -> None:
        self._cluster, self._strides = cluster, axis_strides(parallel)
        self._fabrics: dict[tuple[str, int], Fabric] = {}

    def fabric_of(self, cost: Collective) -> Fabric:
        """What the ranks of a collective see."""
        key = (cost.axis, cost.ranks)
        found = self._fabrics.get(key)
        if found is None:
            # a send goes from one stage to the next, however many there are
            ranks = 2 if cost.axis == "pipeline" else cost.ranks
            stride = self._strides.get(cost.axis, 1)
            found = self._fabrics[key] = fabric(self._cluster, ranks, stride)
        return found

    def seconds(self, cost: Collective, bind: Bindings) -> Seconds:
        """Seconds of a collective by itself."""
        group = self.fabric_of(cost)
        if cost.choices and group.ranks > 1:
            return _all_to_all_s(bind(cost.moved), group, cost.choices, cost.limit)
        return collective_s(cost.kind, bind(cost.moved), group)


# ---------------------------------------------------------------- algorithms


def _ring_s(kind: str, nbytes: Sizes, group: Fabric) -> Seconds:
    n, nodes = group.ranks, group.nodes
    rounds = 2 if kind == "all-reduce" else 1
    between = rounds * (nodes - 1)
    hops = (rounds * (n - 1) - between) * group.hop_s + between * group.network_hop_s
    if kind in ("broadcast", "reduce"):
        return _START_S + _pipelined(nbytes / group.slowest_bytes_per_s, hops)
    wire = rounds * nbytes * (n - 1) / n / group.slowest_bytes_per_s
    return _START_S + _pipelined(wire, hops) + _own_part_s(kind, nbytes, group)


def _tree_s(nbytes: Sizes, group: Fabric) -> Seconds:
    """Two binary trees over the nodes, a chain within each; between two nodes either link carries
    half of what a ring's does."""
    per_node = group.ranks / group.nodes
    carried = 1.0 if group.nodes == 2 else 2.0
    wire = (
        nbytes
        * max(carried / group.network_bytes_per_s, 2.0 * (per_node > 1) / group.bus_bytes_per_s)
        / _TREE_SHARE
    )
    hops = 2 * ((per_node - 1) * group.hop_s + (group.nodes - 1).bit_length() * group.network_hop_s)
    return _START_S + _pipelined(wire, hops)


def _sharp_s(nbytes: Sizes, group: Fabric) -> Seconds:
    """The switch sums what it is read through and multicasts what is written: (1 + 1/n) of the
    message per GPU."""
    per_node = group.ranks / group.nodes
    wire = nbytes * (1 + 1 / per_node) / group.sharp_bytes_per_s
    hops = _SHARP_CHUNK_S
    if group.nodes > 1:
        wire = larger(
            wire,
            nbytes * (1.0 if group.nodes == 2 else 2.0) / group.network_bytes_per_s / _TREE_SHARE,
        )
        hops += 2 * (group.nodes - 1).bit_length() * group.network_hop_s
    return _SHARP_START_S + _pipelined(wire, hops)


def _all_to_all_s(
    nbytes: Sizes, group: Fabric, choices: int = 0, limit: tuple[int, int] | None = None
) -> Seconds:
    """Every rank sends a part to every other; the parts for other nodes go through the adapters.
    Of a token's `choices` one row goes to each rank, and over the network one to each node, whose
    ranks pass it on meanwhile (DeepEP, csrc/kernels/internode.cu)."""
    n, per_node = group.ranks, group.ranks / group.nodes
    near, far = (per_node - 1) / n, (n - per_node) / n
    if choices:
        near = (n - 1) / n * places_reached(n, choices, limit) / choices
        far *= places_reached(group.nodes, choices, limit) / choices
    inside = nbytes * near / group.bus_bytes_per_s
    outside = nbytes * far / (group.network_bytes_per_s / per_node) if group.nodes > 1 else 0.0
    wire = larger(inside, outside) if choices else inside + outside
    hops = group.hop_s * (per_node - 1) + group.network_hop_s * (group.nodes - 1) ** 0.5
    return _START_S + _pipelined(wire, hops) + _own_part_s("all-to-all", nbytes, group)


def _staged_s(nbytes: Sizes, group: Fabric) -> Seconds:
    """Two all-to-alls: among the ranks of a node, then, of the part that a rank has summed, among
    those of one place on every node (DeepSpeed coalesced_collectives.py all_to_all_quant_reduce)."""
    if group.nodes == 1:
        return _all_to_all_s(nbytes, group)
    per_node = -(-group.ranks // group.nodes)
    within = group.replace(ranks=per_node, nodes=1)
    across = group.replace(
        ranks=group.nodes, network_bytes_per_s=group.network_bytes_per_s / per_node
    )
    first = _all_to_all_s(nbytes, within) if per_node > 1 else 0.0
    return first + _all_to_all_s(nbytes / per_node, across)


def _own_part_s(kind: str, nbytes: Sizes, group: Fabric) -> Seconds:
    return (
        nbytes
        / group.ranks
        / max(group.bus_bytes_per_s * _COPY_SPEED.get(kind, _SUM_SPEED), _LEAST_COPY_BYTES_PER_S)
    )


def _path(group: Fabric) -> float:
    """Bytes/s from one rank to the next."""
    return (
        group.bus_bytes_per_s
        if group.nodes == 1
        else group.network_bytes_per_s * group.nodes / group.ranks
    )


def _pipelined(wire: Seconds, hops: Seconds) -> Seconds:
    return (wire**0.5 + hops**0.5) ** 2


def _fastest(found: dict[str, Seconds]) -> Seconds:
    best: Seconds = None
    for seconds in found.values():
        best = seconds if best is None else smaller(best, seconds)
    return best
