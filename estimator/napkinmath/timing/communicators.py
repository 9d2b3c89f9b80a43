"""Device memory that NCCL's communicators hold outside torch's allocator.

A channel's connection within a node is a block of 10 MiB at its receiver and one of 2 MiB at its
sender. The 10 are 4 MiB of Simple, 4.7 of LL128 and 0.5 of LL, rounded up to 2. Over the network it
is 10 MiB at either end (NVIDIA/nccl src/init.cc computeBuffSizes, src/transport/p2p.cc, net.cc).

Algorithms connect when first used (NCCL_RUNTIME_CONNECT, 2.22): a ring within a node, a tree as well
between nodes; sums of many bytes on three and more GPUs behind NVSwitch go through the switch (NVLS,
from Hopper on). Before 2.22 every communicator connects all of them as it is made, and holds the
buffer that sends between nodes share (src/init.cc initTransportsRank, transport/nvls.cc, net.cc
sharedNetBuffersInit). NVLS has a block to gather and one to spread for every GPU and channel: of 4
MiB and 2 for counters up to 2.20, of 1 and 2 in 2.21, of 1 since.

An all-to-all connects every pair, with up to 32 channels each over NVLink (src/enqueue.cc
p2pTaskAppend; NVIDIA/nccl issue 1685: 3.3 GB on 8 H100). Cards without access to each other's memory
pass through the host's.
"""

from __future__ import annotations

from napkinmath.base.units import KIB, MIB
from napkinmath.config.parallel_config import ContextParallel, DataParallel
from napkinmath.ir.stack import EngineCode
from napkinmath.timing.collectives import fabric, has_links_for, has_peer_access, is_switched
from napkinmath.timing.mesh_groups import axis_strides, group_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.hardware import Gpu
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.stack import Stack
    from napkinmath.timing.collectives import Fabric

# NCCL's own kernels and lists: what 342 MiB of two ranks (ai-dynamo/aiconfigurator systems/*.yaml,
# nccl_mem) leave beside a ring's 24 channels.
_KERNELS_BYTES = 54 * MIB
_PAIR_BYTES = 12 * MIB
_NETWORK_PAIR_BYTES = 20 * MIB
_PCIE_CHANNELS = 2
# Channels are twice the rings that the search finds, of a link's 25 GB/s each: 12 on V100, 16 on
# H800; 24 on A100 and H100, 32 on GB200, by the line of channels that NCCL logs.
_LINK_BYTES_PER_S = 25e9
_MOST_CHANNELS, _MOST_CHANNELS_BLACKWELL = 24, 32
_NETWORK_CHANNELS = 16
_NETWORK_PEER_CHANNELS = 2
# Sends between nodes: sixteen slots a channel, of 128 KiB, or 512 where all GPUs have NVLink.
_SLOTS = 16
_NETWORK_SLOT_BYTES, _LINK_SLOT_BYTES = 128 * KIB, 512 * KIB
_SHARED_BYTES = 2 * _NETWORK_CHANNELS * _SLOTS * _NETWORK_SLOT_BYTES
# A tree within a node, beside its ring, a channel: NVIDIA/nccl issue 964 has 688 MiB of three and of
# four A100, 544 of two, whose tree runs along the ring.
_TREE_BYTES = 6 * MIB
_CONNECTS_WHEN_USED, _HAS_NVLS, _NVLS_ON_SEVERAL = (2, 22), (2, 17), (2, 21)
_LEAST_NVLS_RANKS = 3
_NVLS_CHANNELS, _NVLS_CHANNELS_BLACKWELL = 16, 24


def communicator_bytes(
    cluster: Cluster, parallel: ParallelConfig, stack: Stack | None = None
) -> int:
    """Device memory, outside torch's allocator, of the communicators that one rank is in."""
    sizes = {axis: ranks for axis, ranks in group_ranks(parallel).items() if ranks > 1}
    if not sizes:
        return 0
    nccl = stack.engine.nccl if stack else EngineCode().nccl
    apart = ("data", "shard") if stack and stack.engine.averages_apart else ()
    strides, held = axis_strides(parallel), float(_KERNELS_BYTES)
    for axis, ranks in sizes.items():
        group = fabric(cluster, ranks, strides[axis])
        peers = _peers(axis, ranks, parallel)
        each = _group_bytes(cluster.hardware.gpu, group, nccl, peers, sums=_sums(axis, parallel))
        held += 2 * each if axis in apart else each
    if max(sizes.values()) < parallel.world_size:  # all ranks wait for each other and share norms
        held += _group_bytes(cluster.hardware.gpu, fabric(cluster, parallel.world_size), nccl, 0)
    return int(held)


def _peers(axis: str, ranks: int, parallel: ParallelConfig) -> int:
    """To how many ranks of a group a rank sends messages of their own; 0 where all sum or gather."""
    if axis == "expert":
        by_pairs = not parallel.expert_tokens_gathered and not parallel.expert_tokens_once
    else:
        by_pairs = axis == "context" and parallel.context_parallel is ContextParallel.ULYSSES
    if by_pairs:
        return ranks - 1
    if axis == "pipeline":
        return min(2, ranks - 1)
    return 1 if axis == "context" else 0  # a ring sends to one neighbour, receives from the other


def _sums(axis: str, parallel: ParallelConfig) -> bool:
    """Whether a group sums whole tensors, where the others gather, scatter or send."""
    if axis == "tensor":
        return not parallel.sequence_parallel
    return axis == "replica" or (axis == "data" and parallel.data_parallel is DataParallel.DDP)


def _group_bytes(
    gpu: Gpu, group: Fabric, nccl: tuple[int, int], peers: int, *, sums: bool = False
) -> float:
    """One communicator's connections, on average over the ranks of a node."""
    at_once = nccl < _CONNECTS_WHEN_USED
    held = _sends_bytes(gpu, group, peers) if peers else 0.0
    if at_once or not peers:
        held += _ring_bytes(gpu, group)
    if at_once:
        held += _tree_bytes(gpu, group) + (0 if peers and group.nodes > 1 else _slots(gpu, group))
    return held + (_nvls_bytes(gpu, group, nccl) if at_once or sums else 0)


def _ring_bytes(gpu: Gpu, group: Fabric) -> float:
    """A ring's connections, and a tree's between nodes."""
    within = group.ranks / group.nodes
    neighbours = (within - 1) / within * _pair_bytes(gpu, group)
    if group.nodes == 1:
        return _channels(gpu, group) * _pair_bytes(gpu, group)
    channels = 2 * within
    if gpu.is_hopper_or_later and channels < _NETWORK_CHANNELS:  # graph/connect.cc
        channels *= 2
    ring, tree = 1, 2 * (group.nodes - 1) / group.nodes
    across = (ring + tree) * _NETWORK_PAIR_BYTES / within
    return min(channels, _NETWORK_CHANNELS) * (2 * neighbours + across)


def _tree_bytes(gpu: Gpu, group: Fabric) -> float:
    """A tree's connections within one node; between nodes the ring's have them."""
    if group.nodes > 1 or group.ranks < _LEAST_NVLS_RANKS or not _pair_bytes(gpu, group):
        return 0
    return _channels(gpu, group) * _TREE_BYTES


def _slots(gpu: Gpu, group: Fabric) -> float:
    """The buffer of sends between nodes, made where none are sent too."""
    linked = group.nodes == 1 and has_links_for(gpu, group.ranks)
    channels = 1 << (_channels(gpu, group) - 1).bit_length()
    return channels * _SLOTS * (_LINK_SLOT_BYTES if linked else _NETWORK_SLOT_BYTES)


def _nvls_bytes(gpu: Gpu, group: Fabric, nccl: tuple[int, int]) -> float:
    """Buffers of sums through the switch, of the GPUs in a node."""
    heads = group.ranks // group.nodes
    switched = gpu.is_hopper_or_later and is_switched(gpu)
    if nccl < _HAS_NVLS or heads < _LEAST_NVLS_RANKS or not switched:
        return 0
    if nccl == (2, 20) and group.nodes > 1:
        return 0
    blackwell = gpu.architecture.startswith("blackwell") and nccl >= (2, 27)
    channels = _NVLS_CHANNELS_BLACKWELL if blackwell else _NVLS_CHANNELS
    block = 1 if nccl >= _CONNECTS_WHEN_USED else 3 if nccl == (2, 21) else 6
    return heads * channels * 2 * block * MIB


def _sends_bytes(gpu: Gpu, group: Fabric, peers: int) -> float:
    """Connections to single ranks, of those in the node; the others share a buffer."""
    if group.nodes == 1:
        channels = 1 << (_channels(gpu, group) - 1).bit_length()
        return peers * channels * _pair_bytes(gpu, group)
    near = min(peers, group.ranks // group.nodes - 1)
    return near * _NETWORK_PEER_CHANNELS * _pair_bytes(gpu, group) + _SHARED_BYTES


def _pair_bytes(gpu: Gpu, group: Fabric) -> int:
    """What a rank holds to send to one neighbour in its node and to receive from another."""
    linked = has_links_for(gpu, group.ranks // group.nodes)
    return _PAIR_BYTES if linked or has_peer_access(gpu) else 0


def _channels(gpu: Gpu, group: Fabric) -> int:
    """Channels of a group within a node."""
    if gpu.gpu_link is None or not has_links_for(gpu, group.ranks):
        return _PCIE_CHANNELS
    blackwell = gpu.architecture.startswith("blackwell")
    most = _MOST_CHANNELS_BLACKWELL if blackwell else _MOST_CHANNELS
    return min(most, 2 * max(1, int(gpu.gpu_link.bytes_per_s / _LINK_BYTES_PER_S)))
